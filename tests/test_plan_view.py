"""A plan as people see it: every figure of the record is in the table, the JSON and the picture, and none other is."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.core.units import format_bytes
from bigbatch.errors import MissingExtra, OptionError
from bigbatch.planner import Plan, picture
from bigbatch.planner.cards import CARDS, GIB, card
from bigbatch.planner.records import Rung, Way, plain
from bigbatch.planner.table import COLUMNS

FIXED = {"parameters": 2 * GIB, "buffers": 0, "gradients": 2 * GIB, "optimizer state": 4 * GIB}
KINDS = {**FIXED, "activations": GIB, "inputs": 2**20, "temporary": 3 * 2**20}
BF16 = Way("joined", "offload", True, torch.bfloat16)


def rung(name: str = "micro-batches", size: int | None = 16, kinds: Any = KINDS, **others: Any) -> Rung:
    given = {"way": Way(), "optimizer": "AdamW", "host_bytes": 0, "extra_forwards": 0.0, "relative_time": 1.0}
    given |= {"changes_numerics": False, "switch": f"Accumulator(model, loss_fn, micro_batch_size={size})"}
    given |= {"name": name, "micro_batch_size": size, "kinds": kinds, "peak_bytes": sum(kinds.values())}
    return Rung(**{**given, **others})


def made(**others: Any) -> Plan:
    whole = rung("whole batch at once", None, {**KINDS, "activations": 60 * GIB})
    lean = rung("bf16 autocast", 32, {**FIXED, "activations": GIB // 2}, way=BF16, host_bytes=3 * GIB,
                extra_forwards=0.44, relative_time=None, changes_numerics=True, note="needs a recent card",
                switch="MicroBatched(model, 32, checkpoint=True); Adafactor(..., foreach=False)")  # fmt: skip
    course = tuple((size, {**KINDS, "activations": size * GIB // 16}) for size in (1, 8, 16, 64, 1024))
    given = {"batch_size": 1024, "memory_bytes": 12 * GIB, "margin_bytes": GIB, "card": "RTX 3060", "chosen": 1}
    given |= {"rungs": (whole, rung(), lean), "fixed": FIXED, "largest_batch": None, "largest_length": 4096}
    return Plan(**{**given, "how": "fake tensors", "course": course, **others})


def refused(**others: Any) -> Plan:
    none = rung(size=None, kinds={**KINDS, "optimizer state": 12 * GIB, "activations": 8 * GIB})
    small = rung("checkpointed blocks", None, {**KINDS, "optimizer state": 12 * GIB})
    fixed = {**FIXED, "optimizer state": 12 * GIB}
    return made(**{"rungs": (none, small), "chosen": None, "fixed": fixed, "largest_length": None, **others})


# The table.


def rows_of(text: str) -> dict[str, list[str]]:
    """The ladder's rows by the name of their way, read back from the text."""
    lines = text.split("\n\n")[1].splitlines()[1:]
    return {cells[0]: [line[:1], *cells[1:]] for line in lines if (cells := re.split(r"\s{2,}", line[2:].strip()))}


def test_every_rung_has_its_row_and_one_is_recommended() -> None:
    assert rows_of(str(made())) == {
        "whole batch at once": [" ", "no size fits", "68.00 GiB", "-", "+0.00", "1.00", "same"],
        "micro-batches": [">", "16", "9.00 GiB", "-", "+0.00", "1.00", "same"],
        "bf16 autocast": [" ", "32", "8.50 GiB", "3.00 GiB", "+0.44", "?", "change"],
    }
    assert rows_of(str(made(chosen=2)))["micro-batches"][0] == " "


def test_what_was_asked_stands_above() -> None:
    first = str(made()).split("\n\n")[0]
    for words in ("1024 samples", "12.00 GiB on RTX 3060", "1.00 GiB stay free", "with fake tensors"):
        assert words in first
    assert " on " not in str(made(card=None)).split("\n\n")[0]
    assert "measured on 2 and 4 samples" in str(made(how="measured on 2 and 4 samples: why"))


def test_bytes_by_kind_are_sorted_and_add_up_to_the_memory() -> None:
    part = next(part for part in str(made()).split("\n\n") if part.startswith("Where the memory goes"))
    lines = [re.split(r"\s{2,}", line.strip()) for line in part.splitlines()[1:]]
    assert [name for name, *_ in lines[:3]] == ["optimizer state", "parameters", "gradients"]
    assert lines[-2:] == [["stays free", "1.00 GiB", "8%"], ["to spare", "2.00 GiB", "17%"]]
    assert "buffers" not in part  # there are none
    assert sum(int(share.rstrip("%")) for *_, share in lines) == pytest.approx(100, abs=len(lines) / 2)


def test_how_far_it_goes_and_how_it_is_switched_on_stand_below() -> None:
    last = str(made()).split("\n\n")[-1]
    for words in (
        "8.00 GiB: parameters 2.00 GiB",
        "any size",
        "4096 tokens in memory",
        "the model may take fewer",
        "micro_batch_size=16)",
    ):
        assert words in last
    assert "otherwise" not in last
    other = str(made(chosen=2, largest_batch=1, largest_length=None)).split("\n\n")[-1]
    for words in ("1 sample\n", "MicroBatched(model, 32, checkpoint=True)\n", "Adafactor(", "move otherwise"):
        assert words in other
    assert "tokens" not in other
    at_once = replace(made().rungs[0], micro_batch_size=1024)
    assert "3000 samples at once" in str(made(rungs=(at_once,), chosen=0, largest_batch=3000))


def test_notes_and_the_meaning_of_columns_are_told() -> None:
    assert "bf16 autocast: needs a recent card" in str(made())
    assert "Where no size fits, the peak" in str(made())
    assert "Where no size fits, the peak" not in str(made(rungs=made().rungs[1:], chosen=0))


def test_a_budget_that_cannot_be_met_has_its_reason() -> None:
    text = str(refused())
    assert "weights, gradients and AdamW need 16.00 GiB; no micro-batch size fits 12.00 GiB." in text
    assert "smallest peak of any way is 17.00 GiB (checkpointed blocks), and 1.00 GiB" in text
    assert "Where the memory goes" not in text and ">" not in text
    assert "at most 77 tokens" in str(refused(largest_length=77))
    bare = replace(refused(), fixed={"parameters": 16 * GIB})
    assert "weights need 16.00 GiB" in str(bare)


def test_one_sample_that_is_too_large_is_another_reason() -> None:
    big = rung(size=None, kinds={**KINDS, "activations": 8 * GIB})
    text = " ".join(str(refused(rungs=(big,), fixed=FIXED)).split())
    assert "AdamW need 8.00 GiB, and with them one sample at a time 16.00 GiB, of which activations 8.00 GiB" in text


@given(
    sizes=st.lists(st.integers(0, 2**50), min_size=4, max_size=4),
    name=st.text("abc ,=", max_size=90),
    chosen=st.sampled_from([None, 0]),
    switch=st.text("abc (=", max_size=200),
)
def test_the_table_never_grows_too_wide(sizes: list[int], name: str, chosen: int | None, switch: str) -> None:
    kinds = dict(zip(("parameters", "activations", "outputs and loss"), sizes[:3], strict=True))
    one = rung(name, 2**31 - 1, kinds, host_bytes=sizes[3], extra_forwards=9.99, relative_time=9999.99, switch=switch)
    text = str(made(rungs=(one,), chosen=chosen, memory_bytes=1 + sizes[3], margin_bytes=sizes[0]))
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_a_table_that_is_too_wide_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.planner.table.NAME_COLUMNS", 200)
    monkeypatch.setattr("bigbatch.planner.table.COLUMNS", 500)
    assert max(map(len, str(made(rungs=(rung("x" * 180),), chosen=0)).splitlines())) > COLUMNS


# JSON.


def test_json_holds_all_but_the_job() -> None:
    plan = made(job=object())
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["fits"] is True and "job" not in told and "job" not in repr(plan)
    assert set(told) == set(vars(plan)) - {"job"} | {"fits"}
    assert told["rungs"][2]["way"] == {
        "engine": "joined", "activations": "offload", "checkpoint": True, "autocast": "torch.bfloat16"
    }  # fmt: skip
    assert told["rungs"][1]["kinds"] == KINDS
    assert [point["micro_batch_size"] for point in told["course"]] == [1, 8, 16, 64, 1024]
    assert told["course"][0]["kinds"]["activations"] == GIB // 16
    assert refused().to_dict()["fits"] is False


def test_a_dtype_as_it_is_would_be_no_json() -> None:
    with pytest.raises(TypeError):
        json.dumps(vars(BF16))
    assert json.dumps(plain(BF16))


def test_a_plan_is_compared_without_its_job() -> None:
    assert made(job=1) == made(job=2) != made(chosen=2)


# The picture.


def drawn(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The axes of a picture, after it was written."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), real(self, *a, **k)))
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    return kept[0].axes[0]


def test_the_picture_holds_areas_edge_and_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(made(), tmp_path, monkeypatch)
    assert [area.get_label() for area in axes.collections] == [kind for kind in picture.COLOURS if KINDS.get(kind)]
    tops = {
        area.get_label(): max(y for x, y in area.get_paths()[0].vertices if abs(x - 16) < 1e-6)
        for area in axes.collections
    }
    assert tops["temporary"] == pytest.approx(sum(KINDS.values()) / GIB)
    edge, point = axes.lines
    assert set(edge.get_ydata()) == {11.0}  # GiB: the card's without what stays free
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (16, pytest.approx(sum(KINDS.values()) / GIB))
    words = " ".join(text.get_text() for text in axes.texts)
    assert "RTX 3060: 12.00 GiB less 1.00 GiB" in words and "16 at once: 9.00 GiB" in words
    low, high = axes.get_xlim()
    assert low == 1 and 64 < high < 1024  # the edge is passed, and the picture ends soon after


def test_a_picture_of_a_refusal_has_no_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(refused(), tmp_path, monkeypatch)
    assert len(axes.lines) == 1 and "nothing fits" in axes.get_title()
    assert axes.get_ylim()[1] > 11


@pytest.mark.parametrize("unit", ["GiB", "MiB", "KiB", "B"])
def test_a_picture_of_one_size_in_its_unit(unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}[unit]
    one = rung("whole batch at once", 1, {"activations": 3 * scale, "of a new kind": scale})
    course = ((1, one.kinds),)
    plan = made(rungs=(one,), chosen=0, course=course, memory_bytes=9 * scale, margin_bytes=0, batch_size=1, card=None)
    axes = drawn(plan, tmp_path, monkeypatch)
    assert f"({unit})" in axes.get_ylabel() and axes.get_title().startswith("1 sample,")
    assert axes.get_xlim() == (0.5, 1.5) and axes.lines[1].get_ydata()[0] == pytest.approx(4)


def test_without_matplotlib_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        made().draw(tmp_path / "plan.png")


# Cards.


def test_cards_are_found_however_they_are_written() -> None:
    for each in CARDS:
        ways = (
            each.name,
            each.name.lower().replace(" ", "-"),
            f"NVIDIA GeForce {each.name}",
            f"{each.model} {each.gib} GB",
        )
        assert {card(way) for way in ways} == {each}
    for way in ("RTX 4060", "rtx4060", "4060", "NVIDIA GeForce RTX 4060"):
        assert card(way).name == "RTX 4060 8GB"
    assert card("NVIDIA H100 80GB HBM3").gib == 80 and card("Tesla T4").checked


@pytest.mark.parametrize(
    ("name", "said"),
    [("RTX 4061", "RTX 4060 8GB"), ("A100", "A100 40GB, A100 80GB"), ("RTX 3060 8GB", "RTX 3060 12GB"), ("", "memory"),
     ("RTX 4090 Laptop GPU", "RTX 4090 24GB")],
)  # fmt: skip
def test_an_unknown_card_is_refused_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(OptionError) as error:
        card(name)
    assert said in f"{error.value.found} {error.value.do}" and repr(name) in error.value.asked


# What PyTorch said of its device in reports of running out of memory, GiB: the least that was seen, and the sheet's.
@pytest.mark.parametrize(("name", "said"), [("RTX 4060", 7.62), ("RTX 4090", 23.64), ("T4", 14.75), ("L40S", 44.43)])
def test_a_card_is_never_larger_than_its_driver_says(name: str, said: float) -> None:
    assert 0.95 * said < card(name).memory_bytes / GIB <= said + 0.005
    assert card(name).gib > said  # the data sheet alone would have said too much


@pytest.mark.gpu
def test_this_card_is_in_the_table_with_what_it_has() -> None:
    found = torch.cuda.get_device_properties(0)
    try:
        known = card(found.name)
    except OptionError:
        pytest.skip(f"{found.name} is not in the table")
    assert 0.94 * found.total_memory < known.memory_bytes <= found.total_memory


def test_cards_are_sorted_out() -> None:
    assert len({each.name for each in CARDS}) == len(CARDS) >= 25
    assert all(each.memory_bytes < each.gib * GIB for each in CARDS)
    assert format_bytes(card("H200").memory_bytes) == "136.59 GiB"
