"""Options: what is accepted, what is refused, and what the one error says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mpcompile.config import (
    BUILT_PASSES,
    PASS_NAMES,
    PLANNED_PASSES,
    Config,
    environment_settings,
    is_disabled,
    option_rows,
)
from mpcompile.errors import ConfigError


def parse(environ: Mapping[str, str] | None = None, /, **options: object) -> Config:
    """Build a Config that the environment of the test run cannot disturb."""
    return Config.from_options(options, environ=environ or {})


def refusal(environ: Mapping[str, str] | None = None, /, **options: object) -> str:
    """Return the text of the ConfigError."""
    with pytest.raises(ConfigError) as caught:
        parse(environ, **options)
    return str(caught.value)


def test_no_options_give_the_defaults() -> None:
    assert Config.from_options(None, environ={}) == Config()
    assert Config().dtype is torch.bfloat16
    assert Config().capture == "whole"


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "BF16", " bf16 ", torch.bfloat16])
def test_bfloat16_has_several_names(name: object) -> None:
    assert parse(dtype=name).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["fp32", "float32", torch.float32])
def test_float32_has_several_names(name: object) -> None:
    assert parse(dtype=name).dtype is torch.float32


@pytest.mark.parametrize("name", ["fp16", "float16", "half", torch.float16])
def test_float16_has_several_names(name: object) -> None:
    assert parse(dtype=name).dtype is torch.float16


@pytest.mark.parametrize(
    ("value", "expected"),
    [("dynamic", "dynamic"), (" Apex ", "apex"), (1024, 1024.0), ("2**-3", 0.125), ("64", 64.0)],
)
def test_loss_scale_is_a_policy_or_a_power_of_two(value: object, expected: object) -> None:
    assert parse(dtype="fp16", loss_scale=value).loss_scale == expected


def test_bounds_of_the_loss_scale_may_be_left_to_the_policy() -> None:
    config = parse({"MPCOMPILE_HYSTERESIS": "none"}, dtype="fp16", scale_floor=None)
    assert config == parse(dtype="fp16")


def test_loss_scale_that_would_do_nothing_is_a_mistake() -> None:
    assert "loss_scale, hysteresis: only float16 needs a loss scale, dtype is bfloat16" in refusal(
        loss_scale="apex", hysteresis=2
    )
    assert "growth_interval: a loss_scale that is a number never changes" in refusal(
        dtype="fp16", loss_scale=8, growth_interval=9
    )
    assert "scale_floor=4 is above scale_ceiling=2. Swap them." in refusal(
        dtype="fp16", scale_floor=4, scale_ceiling=2
    )


@pytest.mark.parametrize("name", ["fp8", "float64", torch.float64, torch.float8_e4m3fn, 16, None])
def test_other_dtypes_are_refused(name: object) -> None:
    assert "is no dtype to train in" in refusal(dtype=name)


def test_lists_and_comma_separated_strings_mean_the_same() -> None:
    listed = parse(keep_fp32=["aten.mm", "head.*"], disable=("fold-casts",))
    joined = parse(keep_fp32=" aten.mm, head.*,", disable="fold-casts")
    assert listed == joined
    assert listed.keep_fp32 == ("aten.mm", "head.*")


def test_disabled_pass_is_not_enabled() -> None:
    config = parse(disable=["fold-casts", "fuse-updates"])
    assert not config.is_pass_enabled("fold-casts")
    assert config.is_pass_enabled("insert-casts")
    assert not config.is_pass_enabled("fuse-updates")


@pytest.mark.parametrize("name", BUILT_PASSES)
def test_built_pass_can_be_named_in_enable(name: str) -> None:
    assert parse(enable=name).is_pass_enabled(name)


@pytest.mark.parametrize("name", PLANNED_PASSES)
def test_enabling_a_planned_pass_is_refused_as_not_yet(name: str) -> None:
    assert f"options['enable']: {name} is not yet built" in refusal(enable=[name])
    assert not Config().is_pass_enabled(name)


def test_pass_names_are_exact() -> None:
    text = refusal(disable=["fold_casts", "insert-casts", "casts"])
    assert "'fold_casts' is no pass; did you mean 'fold-casts'?" in text
    assert "'casts' is no pass" in text
    assert all(name in text for name in PASS_NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", "apex-o1"),
        ("table", "grappler"),
    ],
)
def test_what_is_planned_is_refused_by_name(name: str, value: object) -> None:
    assert f"options['{name}']: " in refusal(**{name: value})
    assert "not yet built" in refusal(**{name: value})
    assert f"environment MPCOMPILE_{name.upper()}: " in refusal({f"MPCOMPILE_{name.upper()}": "1"})


@pytest.mark.parametrize(
    ("name", "value"), [("capture", "whole"), ("grads", "keep"), ("check", "first-step")]
)
def test_the_value_in_force_may_be_written_out(name: str, value: str) -> None:
    assert parse(**{name: value}) == Config()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("table", "paint", "did you mean 'painted'? Use painted, autocast-cuda or autocast-cpu."),
        ("lowering", "Eager", "did you mean 'eager'? Use inductor or eager."),
        ("mode", "fast", "'fast' is unknown. Use default, reduce-overhead or max-autotune."),
        ("keep_fp32", 3, "3 is not a list of names."),
        ("keep_half", ["a", 3], "['a', 3] is not a list of names."),
        ("disable", {"fold-casts": False}, "is not a list of names."),
        ("verify_graph", "maybe", "'maybe' is not a switch."),
        ("verify_graph", 1, "1 is not a switch."),
        ("max_recompiles", 0, "0 is not a count."),
        ("max_recompiles", True, "True is not a count."),
        ("max_recompiles", "-1", "'-1' is not a count."),
        (
            "loss_scale",
            "apx",
            "did you mean 'apex'? Use dynamic, torch, apex, fairseq or deepspeed",
        ),
        ("loss_scale", 3, "3 is no loss scale. Use dynamic"),
        ("scale_floor", 0, "0 is no power of two from 2**-126 to 2**126. Use 1024 or 2**-14."),
        ("scale_ceiling", "2**9x", "'2**9x' is no power of two"),
        ("scale_ceiling", True, "True is no power of two"),
        ("scale_ceiling", "2**9999", "is no power of two"),
        ("growth_interval", 0, "0 is not a count."),
        ("report_dir", 7, "7 is not a path."),
        ("report_dir", " ", "' ' is not a path."),
        ("assignment", 7, "7 is not a path."),
        ("assignment", {"a": object()}, "the assignment is not JSON"),
    ],
)
def test_wrong_value_is_named_with_the_right_ones(name: str, value: object, match: str) -> None:
    text = refusal(**{name: value})
    assert f"1 mistake in the options of backend 'mpcompile':\n  - options['{name}']: " in text
    assert match in text


def test_unknown_option_gets_a_suggestion_and_the_list() -> None:
    text = refusal(dissable="fold-casts")
    assert "'dissable' is no option; did you mean 'disable'?" in text
    assert text.endswith(
        f"The options are {', '.join(f.name for f in dataclasses.fields(Config))}."
    )


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'triton\.cudagraphs' is no option\."):
        Config.from_options({"triton.cudagraphs": True}, environ={})


def test_options_that_are_no_dict_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a dict"):
        Config.from_options(["dtype"], environ={})  # type: ignore[arg-type]  # the mistake tried


def test_all_mistakes_of_a_call_come_together() -> None:
    text = refusal(
        {"MPCOMPILE_TABEL": "painted", "MPCOMPILE_LOWERING": "cuda"},
        dtype="fp61",
        disable=["fold"],
        wire_dtype="int8",
    )
    assert text.startswith("5 mistakes in the options of backend 'mpcompile':\n")
    for part in (
        "options['dtype']: 'fp61' is no dtype",
        "options['disable']: 'fold' is no pass",
        "options['wire_dtype']: 'int8' is no dtype to send in",
        "'MPCOMPILE_TABEL' is no option; did you mean 'MPCOMPILE_TABLE'?",
        "environment MPCOMPILE_LOWERING: 'cuda' is unknown",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("raw", "value"),
    [("fp16", torch.float16), ("bfloat16", torch.bfloat16), (torch.float32, torch.float32)],
)
def test_wire_dtype_takes_names_and_dtypes(raw: object, value: torch.dtype) -> None:
    assert parse(wire_dtype=raw).wire_dtype is value
    assert parse(wire_dtype=None).wire_dtype is None


@pytest.mark.parametrize(("raw", "value"), [("off", "off"), ("first-step", "first-step"), ("7", 7)])
def test_check_sync_takes_a_word_or_a_count(raw: object, value: object) -> None:
    assert parse(check_sync=raw).check_sync == value


def test_wrong_check_sync_is_refused() -> None:
    expected = "options['check_sync']: 0 does not say when to compare. Use first-step, off, or a"
    assert expected in refusal(check_sync=0)


def test_environment_sets_every_option() -> None:
    config = parse(
        {
            "MPCOMPILE_DTYPE": "fp32",
            "MPCOMPILE_TABLE": "autocast-cpu",
            "MPCOMPILE_KEEP_FP32": "aten.mm,head.*",
            "MPCOMPILE_DISABLE": "fold-casts",
            "MPCOMPILE_LOWERING": "eager",
            "MPCOMPILE_VERIFY_GRAPH": "1",
            "MPCOMPILE_MAX_RECOMPILES": "8",
            "MPCOMPILE_REPORT_DIR": "here",
            "MPCOMPILE_KEEP_HALF": "",
            "MPCOMPILE": "1",
            "PATH": "/bin",
        }
    )
    assert config == Config(
        dtype=torch.float32,
        table="autocast-cpu",
        keep_fp32=("aten.mm", "head.*"),
        disable=("fold-casts",),
        lowering="eager",
        verify_graph=True,
        max_recompiles=8,
        report_dir=Path("here"),
    )


def test_explicit_option_wins_over_the_environment() -> None:
    environ = {"MPCOMPILE_DTYPE": "rubbish", "MPCOMPILE_MODE": "max-autotune"}
    assert parse(environ, dtype="fp32", mode="default") == Config(dtype=torch.float32)


def test_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE_TABLE", "autocast-cuda")
    assert Config.from_options({}).table == "autocast-cuda"


def test_mode_of_torch_compile_is_taken() -> None:
    assert Config.from_options(None, "max-autotune", {}).mode == "max-autotune"
    assert Config.from_options({"mode": "default"}, "default", {}).mode == "default"
    with pytest.raises(ConfigError, match=r"torch\.compile\(mode=\.\.\.\): 'turbo' is unknown"):
        Config.from_options(None, "turbo", {})
    with pytest.raises(ConfigError, match=r"two modes\. Keep one"):
        Config.from_options({"mode": "default"}, "max-autotune", {})


def test_contradictions_are_mistakes() -> None:
    assert "both name fold-casts" in refusal(disable="fold-casts", enable="fold-casts")
    assert "keep_fp32 and keep_half: both name aten.mm" in refusal(
        keep_fp32=["aten.mm", "aten.bmm"], keep_half=["aten.mm"]
    )


def test_assignment_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "assignment.json"
    path.write_text('[{"node": "mm", "dtype": "bfloat16"}]')
    config = parse(assignment=path)
    assert config == parse({"MPCOMPILE_ASSIGNMENT": str(path)})
    assert config.assignment is not None
    assert config.assignment.load() == [{"node": "mm", "dtype": "bfloat16"}]
    assert config.assignment.source == str(path)


def test_assignment_may_be_handed_over_loaded() -> None:
    config = parse(assignment={"mm": "bfloat16"})
    assert config.assignment is not None
    assert config.assignment.load() == {"mm": "bfloat16"}
    assert hash(config) == hash(parse(assignment={"mm": "bfloat16"}))


def test_broken_assignment_files_are_mistakes(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "is not JSON" in refusal(assignment=broken)
    assert "cannot read" in refusal(assignment=tmp_path / "absent.json")
    assert "cannot read" in refusal(assignment=tmp_path)


def test_kill_switch() -> None:
    assert is_disabled({"MPCOMPILE": "0"})
    assert not is_disabled({"MPCOMPILE": "1"})
    assert not is_disabled({"MPCOMPILE": ""})
    assert not is_disabled({})
    with pytest.raises(ConfigError, match=r"MPCOMPILE='off' is not a switch\. Use MPCOMPILE=0"):
        is_disabled({"MPCOMPILE": "off"})


def test_environment_settings_lists_what_is_set() -> None:
    environ = {"MPCOMPILE_TABLE": "x", "MPCOMPILE": "0", "MPCOMPILE_MODE": "", "MPC": "1"}
    assert environment_settings(environ) == {"MPCOMPILE": "0", "MPCOMPILE_TABLE": "x"}


def test_config_is_hashable_and_its_repr_is_stable(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    one = parse(disable="fold-casts", keep_fp32="aten.mm", assignment=path, report_dir="c")
    other = parse(disable="fold-casts", keep_fp32="aten.mm", assignment=path, report_dir="c")
    assert {one, other} == {one}
    assert repr(one) == repr(other)
    assert " at 0x" not in repr(one)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp32"},
        {"table": "autocast-cpu"},
        {"keep_fp32": "aten.mm"},
        {"keep_half": "aten.mm"},
        {"assignment": {"mm": "float32"}},
        {"disable": "fold-casts"},
        {"lowering": "eager"},
        {"mode": "max-autotune"},
    ],
)
def test_cache_key_follows_what_changes_graphs(change: dict[str, object]) -> None:
    assert parse(**change).cache_key() != Config().cache_key()
    assert parse(**change).cache_key() == parse(**change).cache_key()


@pytest.mark.parametrize(
    "change",
    [
        {"enable": "fold-casts"},
        {"cache_dir": "c"},
        {"verify_graph": True},
        {"max_recompiles": 3},
        {"report_dir": "c"},
        {"report_dir": "r"},
    ],
)
def test_cache_key_ignores_the_rest(change: dict[str, object]) -> None:
    assert parse(**change).cache_key() == Config().cache_key()


def test_cache_key_follows_the_contents_of_an_assignment(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    keys = []
    for document in ({}, {"mm": "float32"}):
        path.write_text(json.dumps(document))
        keys.append(parse(assignment=path).cache_key())
    assert keys[0] != keys[1]


def test_option_rows_cover_every_option_once() -> None:
    rows = option_rows()
    names = [row.name for row in rows]
    built = [row.name for row in rows if row.default != "not yet"]
    assert len(set(names)) == len(names)
    assert built == [spec.name for spec in dataclasses.fields(Config)]
    assert all(row.values and row.meaning.endswith(".") for row in rows)
    assert ("dtype", "bfloat16") in {(row.name, row.default) for row in rows}


def test_built_passes_keep_the_order_of_the_pipeline() -> None:
    assert list(BUILT_PASSES) == [name for name in PASS_NAMES if name in BUILT_PASSES]
