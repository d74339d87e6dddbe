"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_k3 import K3Error
from mlx_k3.units import format_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("17", 17),
        ("24GB", 24_000_000_000),
        ("24gb", 24_000_000_000),
        ("24G", 24_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("512MiB", 536_870_912),
        (".5KB", 500),
        ("13GB/s", 13_000_000_000),
        (" 2 TB ", 2_000_000_000_000),
        ("1.", 1),
    ],
)
def test_parse(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "12 apples", "1,5GB", "2 GB each"])
def test_refused(text: str) -> None:
    with pytest.raises(K3Error, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (17_547_264, "17.5 MB"),
        (999_400, "999 KB"),
        (999_600, "1 MB"),
        (15_722_348_544, "15.7 GB"),
        (115_000_000_000, "115 GB"),
        (1_560_860_324_864, "1.56 TB"),
        (-1500, "-1.5 KB"),
    ],
)
def test_format(n: int, expected: str) -> None:
    assert format_bytes(n) == expected


@given(st.integers(0, 10**15))
def test_a_shown_size_reads_back_to_three_digits(n: int) -> None:
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=0.006)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("5000", 5000), ("32k", 32768), ("32 K", 32768), ("1M", 1048576)],
)
def test_tokens(text: str, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "0", "0k", "-1", "1.5k", "32kb", "k"])
def test_no_number_of_tokens(text: str) -> None:
    with pytest.raises(K3Error, match="is not a number of tokens"):
        parse_tokens(text)
