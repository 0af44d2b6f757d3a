"""A few epochs of examples/train_digits.py without Inductor."""

from __future__ import annotations

import re

import pytest

from examples import train_digits

FLAGS = "--lowering eager --no-compare".split()
SPREAD = 0.006
"""How far the losses of three seeds are apart in float32: 0.0182, 0.0134 and 0.0119."""


def test_images_are_split_by_class_without_overlap() -> None:
    train, test = train_digits.load_images("cpu")

    assert (len(train), len(test)) == (1437, 360)
    assert set(test.tensors[1].bincount().tolist()) <= {34, 35, 36, 37}
    assert 0 <= train.tensors[0].min() < train.tensors[0].max() <= 1


def test_required_accuracy_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--epochs", "1", "--report"]
    assert train_digits.main([*flags, "--require-accuracy", "1.01"]) == 1

    printed = capsys.readouterr().out
    assert "below the 101.00% asked for" in printed
    assert "assign-precision" in printed
    assert re.search(r"tensors in the state dict +17 float32, 3 int64", printed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_read_more_than_97_percent(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--dtype", dtype, "--compare", "--require-accuracy", "0.97"]
    assert train_digits.main(flags) == 0

    printed = capsys.readouterr().out
    assert re.search(rf"mpcompile {dtype} +aot_eager float32", printed)
    losses = re.search(r"training loss, last epoch +(\S+) +(\S+)", printed)
    assert losses is not None
    ours, plain = map(float, losses.groups())
    assert abs(ours - plain) < SPREAD


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "inductro"], "inductro is not one of .*inductor"),
        (["--backend", "inductor", "--dtype", "bfloat16"], "leave --dtype out"),
    ],
)
def test_wrong_flag_says_what_to_do(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_digits.main(flags)

    assert re.search(message, capsys.readouterr().err)
