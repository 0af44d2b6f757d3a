"""Which precision an operation gets: named tables from op to rule, each rule with its source.

A table answers for the op alone. What an op's neighbours, the user's pins and the available kernels
say on top of that is decided by the ``assign-precision`` pass, which is why the rules here are
plain data. Op names are overload packets (``aten.mm``): no rule differs between overloads.

Sources are quoted as ``torch/aten/src/ATen/autocast_mode.h`` lists (torch 2.14.1) unless they say
``painted``, which marks a decision of this project with its reason.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Precision(enum.Enum):
    """How one node computes its fp32 values, and how it stores them.

    ``FP32_HALF`` computes in fp32 and rounds the result once: the way to mix a 16-bit activation
    with an fp32 parameter without rounding the parameter.
    """

    FP32 = "fp32"
    HALF = "half"
    FP32_HALF = "fp32->half"

    @property
    def computes_half(self) -> bool:
        """Whether floating inputs are cast to 16 bits."""
        return self is Precision.HALF

    @property
    def stores_half(self) -> bool:
        """Whether the result is kept in 16 bits."""
        return self is not Precision.FP32


class Rule(enum.Enum):
    """What a table says of an op."""

    HALF = "half"  # cast every eligible input to 16 bits
    FP32 = "fp32"  # cast every eligible input up
    PROMOTE = "promote"  # widest of the inputs, parameters included
    NEUTRAL = "neutral"  # follows the data that reaches it, and rounds once
    EXACT = "exact"  # follows the data that reaches it, and cannot round: selection, relu, padding
    MIXED = "mixed"  # computes in fp32, and stores its first result as its first input is stored
    MOVE = "move"  # moves data of one input: never a reason to cast
    RANDOM = "random"  # draws random numbers: computed as traced, or the stream would change


@dataclass(frozen=True)
class Entry:
    """One row of a table: the rule, and where it comes from."""

    rule: Rule
    source: str


@dataclass(frozen=True)
class Table:
    """A named precision table.

    Attributes:
        name: value of ``options={"table": ...}``.
        entries: overload packet name (``aten.mm``) to entry.
        composites: name of a function in Dynamo's graph (``cross_entropy``, with its mode
            ``interpolate-bilinear``) to entry; such ops are decomposed before ATen, so the rule is
            attached while they are still whole.
        unlisted: the entry of an op that is not in ``entries``.
        weak_parameters: a parameter that meets 16-bit data does not raise it to fp32.
        ruled_backward: the table also rules backward nodes. Autocast's do not: autograd runs each
            backward op in the dtype that its forward op produced.
        keeps_products: a matrix product of operands that the user cast to fp32 stays fp32. Autocast
            casts them down again.
    """

    name: str
    entries: Mapping[str, Entry]
    composites: Mapping[str, Entry]
    unlisted: Entry
    weak_parameters: bool
    ruled_backward: bool
    keeps_products: bool

    def entry(self, op: str) -> Entry:
        """Return the entry of ``op``, which is ``unlisted`` if the table does not name it."""
        return self.entries.get(op, self.unlisted)


def _rows(rule: Rule, source: str, ops: str) -> dict[str, Entry]:
    """Return one row an op; a name without a namespace is one of ``aten``."""
    return {op if "." in op else f"aten.{op}": Entry(rule, source) for op in ops.split()}


def _names(rule: Rule, source: str, names: str) -> dict[str, Entry]:
    return {name: Entry(rule, source) for name in names.split()}


def _without(entries: Mapping[str, Entry], ops: Iterable[str]) -> dict[str, Entry]:
    dropped = {f"aten.{op}" for op in ops}
    return {op: entry for op, entry in entries.items() if op not in dropped}


# One input whose elements are moved, repeated or picked. No arithmetic, hence no rounding.
_MOVE = _rows(
    Rule.MOVE,
    "data movement",
    """view _unsafe_view reshape _reshape_alias permute t transpose expand squeeze unsqueeze slice
    select split split_with_sizes unbind chunk as_strided detach alias diagonal unfold clone
    lift_fresh lift_fresh_copy flip roll repeat narrow view_as movedim swapaxes flatten
    view_copy permute_copy t_copy transpose_copy expand_copy squeeze_copy unsqueeze_copy slice_copy
    select_copy split_copy as_strided_copy diagonal_copy unbind_copy contiguous""",
)

_RANDOM = _rows(
    Rule.RANDOM,
    "random stream is kept as traced",
    """native_dropout rrelu_with_noise rrelu_with_noise_functional bernoulli normal_functional
    rand_like randn_like randint_like multinomial poisson binomial _standard_gamma exponential
    log_normal geometric cauchy uniform""",
)

_EXACT = _rows(
    Rule.EXACT,
    "painted: selection, no rounding",
    """neg abs sign relu relu6 hardtanh clamp clamp_min clamp_max maximum minimum fmax fmin where
    masked_fill masked_scatter threshold cat stack constant_pad_nd reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d index _unsafe_index
    _unsafe_masked_index index_select gather index_put _unsafe_index_put scatter slice_scatter
    select_scatter as_strided_scatter diagonal_scatter index_copy index_fill tril triu copy
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d adaptive_max_pool3d pixel_shuffle pixel_unshuffle channel_shuffle amax amin
    max min sort topk threshold_backward hardtanh_backward select_backward
    slice_backward diagonal_backward masked_scatter_backward
    value_selecting_reduction_backward""",
)
_NEUTRAL = _rows(
    Rule.NEUTRAL,
    "painted: elementwise or a small window, one rounding",
    """add sub rsub mul div leaky_relu elu celu selu _prelu_kernel hardsigmoid hardswish gelu silu
    mish sigmoid tanh glu square addcmul lerp softshrink hardshrink avg_pool1d avg_pool2d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d col2im im2col leaky_relu_backward
    elu_backward hardsigmoid_backward hardswish_backward gelu_backward silu_backward mish_backward
    sigmoid_backward tanh_backward glu_backward native_dropout_backward _prelu_kernel_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward
    avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward reflection_pad1d_backward reflection_pad2d_backward
    replication_pad2d_backward unfold_backward softshrink_backward hardshrink_backward""",
)

_MIXED = _rows(
    Rule.MIXED,
    "data is kept as it arrives, weights and statistics in fp32",
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_batch_norm_backward cudnn_batch_norm
    cudnn_batch_norm_backward _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward""",
)

_ATTENTION = """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
    _flash_attention_backward _efficient_attention_forward _efficient_attention_backward"""

_CUDA_HALF_OPS = f"""_convolution convolution convolution_backward convolution_overrideable
    cudnn_convolution cudnn_convolution_transpose conv_tbc conv_tbc_backward mm addmm
    _addmm_activation bmm baddbmm addbmm mv addmv addr linalg_vecdot chain_matmul linalg_multi_dot
    prelu linear matmul
    _thnn_fused_lstm_cell _thnn_fused_gru_cell {_ATTENTION}"""
_RECURRENT = _rows(
    Rule.HALF,
    "autocast CUDA: lower_precision_fp (recurrent layers)",
    "mpcompile.recurrent mpcompile.recurrent_backward",
)
_CUDA_HALF = {
    **_rows(Rule.HALF, "autocast CUDA: lower_precision_fp", _CUDA_HALF_OPS),
    **_RECURRENT,
}

_UPSAMPLE = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""
_LOSSES = """nll_loss_forward nll_loss2d_forward nll_loss_nd smooth_l1_loss huber_loss mse_loss
    multilabel_margin_loss_forward soft_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits _ctc_loss kl_div l1_loss"""
_CUDA_FP32 = {
    **_rows(
        Rule.FP32,
        "autocast CUDA: fp32",
        f"""acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
        softplus native_layer_norm layer_norm native_group_norm group_norm _fused_rms_norm rms_norm
        _cdist_forward _pdist_forward dist renorm logsumexp {_LOSSES} {_UPSAMPLE}""",
    ),
    **_rows(
        Rule.FP32,
        "autocast CUDA: fp32_set_opt_dtype, fp32_append_dtype",
        """prod _softmax _log_softmax _safe_softmax softmax log_softmax cumprod cumsum
        linalg_vector_norm linalg_matrix_norm sum norm""",
    ),
}
_CUDA_PROMOTE = _rows(
    Rule.PROMOTE,
    "autocast CUDA: promote",
    """addcdiv addcmul atan2 cross linalg_cross dot vdot grid_sampler_2d grid_sampler_3d index_put
    tensordot scatter_add""",
)

_BACKWARD_OF_FP32 = """_softmax_backward_data _log_softmax_backward_data native_layer_norm_backward
    native_group_norm_backward _fused_rms_norm_backward nll_loss_backward nll_loss2d_backward
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    multilabel_margin_loss_backward multi_margin_loss_backward softplus_backward
    logit_backward log_sigmoid_backward _cdist_backward _pdist_backward _ctc_loss_backward
    grid_sampler_2d_backward grid_sampler_3d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact2d_backward
    upsample_linear1d_backward upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward
    upsample_trilinear3d_backward upsample_bicubic2d_backward"""

_PAINTED_FP32 = {
    **_rows(
        Rule.FP32,
        "painted: mean, variance or accumulation, fp32 on every device",
        """mean var std var_mean std_mean nansum trace logcumsumexp embedding_dense_backward
        embedding_sparse_backward _embedding_bag _embedding_bag_backward index_add scatter_add
        scatter_reduce index_reduce segment_reduce cumsum sum_to_size""",
    ),
    **_rows(
        Rule.FP32,
        "painted: argument reduction or steep slope, bits are lost before the result is small",
        """sin cos atan atan2 sqrt log_sigmoid_forward erf erfc exp2 acosh asinh atanh lgamma
        digamma polygamma i0 special_i1 binary_cross_entropy binary_cross_entropy_backward logit
        remainder fmod floor ceil round trunc frac special_erfcx""",
    ),
    **_rows(Rule.FP32, "painted: gradient of an fp32 op", _BACKWARD_OF_FP32),
}

# torch.nn.functional.interpolate is traced as index arithmetic, and its mode is gone with its name.
_INTERPOLATE = _names(
    Rule.FP32,
    "autocast CUDA: fp32, the upsample family",
    "interpolate-linear interpolate-bilinear interpolate-bicubic interpolate-trilinear",
)
_CUDA_COMPOSITES = {
    **_INTERPOLATE,
    **_names(
        Rule.FP32,
        "autocast CUDA: fp32",
        """cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy nll_loss
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss
        triplet_margin_with_distance_loss multi_margin_loss binary_cross_entropy_with_logits
        binary_cross_entropy gaussian_nll_loss layer_norm rms_norm group_norm dist pdist cdist
        renorm logsumexp softplus ctc_loss""",
    ),
}
_CPU_COMPOSITES = _names(
    Rule.FP32,
    "autocast CPU: fp32",
    """binary_cross_entropy grid_sample polar prod quantile nanquantile stft istft cdist trace
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss
    multi_margin_loss soft_margin_loss triplet_margin_loss poisson_nll_loss
    binary_cross_entropy_with_logits""",
)

PAINTED = Table(
    name="painted",
    entries={
        **_MOVE,
        **_RANDOM,
        **_EXACT,
        **_NEUTRAL,
        **_MIXED,
        **_without(_CUDA_PROMOTE, ("index_put", "scatter_add", "addcmul")),
        **_CUDA_FP32,
        **_PAINTED_FP32,
        **_CUDA_HALF,
    },
    composites=_CUDA_COMPOSITES,
    unlisted=Entry(Rule.FP32, "painted: not in the table, kept as traced"),
    weak_parameters=True,
    ruled_backward=True,
    keeps_products=True,
)

AUTOCAST_CUDA = Table(
    name="autocast-cuda",
    entries={
        **_MOVE,
        **_RANDOM,
        **_MIXED,
        **_CUDA_PROMOTE,
        **_CUDA_FP32,
        **_CUDA_HALF,
        **_rows(Rule.HALF, "autocast CUDA: lower_precision_fp (prelu)", "_prelu_kernel"),
    },
    composites=_CUDA_COMPOSITES,
    unlisted=Entry(Rule.PROMOTE, "autocast CUDA: falls through"),
    weak_parameters=False,
    ruled_backward=False,
    keeps_products=False,
)

_CPU_MIXED = _rows(
    Rule.MIXED,
    "autocast CPU: falls through to a kernel for 16-bit data with fp32 weights",
    """native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward""",
)
AUTOCAST_CPU = Table(
    name="autocast-cpu",
    entries={
        **_MOVE,
        **_RANDOM,
        **_MIXED,
        **_CPU_MIXED,
        **_rows(
            Rule.FP32,
            "autocast CPU: fp32",
            f"""avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d
            max_pool3d_with_indices max_unpool2d max_unpool3d fractional_max_pool2d
            fractional_max_pool3d reflection_pad1d reflection_pad2d replication_pad1d
            replication_pad2d replication_pad3d binary_cross_entropy {_LOSSES} grid_sampler_2d
            grid_sampler_3d polar prod _cdist_forward trace view_as_complex _fft_r2c _fft_c2r
            _fft_c2c linalg_cholesky_ex linalg_inv_ex linalg_qr _linalg_svd _linalg_eigh linalg_eig
            _linalg_solve_ex linalg_lstsq linalg_lu_factor_ex linalg_lu linalg_lu_solve
            linalg_householder_product ormqr geqrf triangular_solve linalg_solve_triangular""",
        ),
        **_rows(Rule.PROMOTE, "autocast CPU: promote", "cat stack index_copy"),
        **_rows(
            Rule.HALF,
            "autocast CPU: lower_precision_fp",
            f"""_convolution convolution conv_tbc mm bmm addmm _addmm_activation addbmm baddbmm
            linalg_vecdot mkldnn_rnn_layer prelu _prelu_kernel _native_multi_head_attention linear
            matmul {_ATTENTION}""",
        ),
        **_RECURRENT,
    },
    composites=_CPU_COMPOSITES,
    unlisted=Entry(Rule.PROMOTE, "autocast CPU: falls through"),
    weak_parameters=False,
    ruled_backward=False,
    keeps_products=False,
)

TABLES: Mapping[str, Table] = {
    table.name: table for table in (PAINTED, AUTOCAST_CUDA, AUTOCAST_CPU)
}


@dataclass(frozen=True)
class Decision:
    """What ``assign-precision`` decided for one node, and why.

    Attributes:
        precision: how the node computes and stores.
        reason: one line for people: which rule, pin, override or missing kernel decided.
    """

    precision: Precision
    reason: str
