"""Every loss of torch.nn, cut into micro-batches, against plain PyTorch on the whole batch in float64."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.core.loss_table import ENTRIES
from bigbatch.core.losses import KnownLoss, call_loss, recognise
from loss_cases import CASES, CLASSES, SAMPLES, Case, built, labels, leaves_of, pieces, real, share, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CUTS = ([3, 3, 1], [1] * SAMPLES, [SAMPLES])
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LEGACY = {"size_average", "reduce"}
REFUSED = {("l1_loss", "weight"), ("mse_loss", "weight"), ("huber_loss", "weight")}


def added_up(loss_fn: Any, case: Case, sizes: list[int], weigh: Callable[..., list[Any]]) -> tuple[Any, Any]:
    """Loss and gradients of the whole batch in plain PyTorch, and of the weighed micro-batches."""
    known = recognise(loss_fn)
    assert known is not None
    outputs, targets = case.make()
    leaves = [leaf.requires_grad_() for leaf in leaves_of(loss_fn, outputs)]
    whole = case.call(loss_fn, outputs, targets)
    gradients = torch.autograd.grad(whole, leaves)
    parts = pieces(case, outputs, targets, sizes)
    assert float(sum(known.count(y, n) for _, y, n in parts)) == pytest.approx(float(known.count(targets, SAMPLES)))
    losses = [known.loss(outputs, targets) for outputs, targets, _ in parts]
    added = sum(weight * loss for weight, loss in zip(weigh(known, parts), losses, strict=True))
    return (whole, *gradients), (added, *torch.autograd.grad(added, leaves))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_micro_batches_add_up_to_the_whole_batch(case: Case) -> None:
    for reduction in case.reductions:
        for loss_fn in built(case, reduction):
            for sizes in CUTS:
                wanted, found = added_up(loss_fn, case, sizes, weights_of)
                torch.testing.assert_close(found, wanted, **EXACT)


def mean_of_means(known: KnownLoss, parts: list[Any]) -> list[float]:
    scale = [1.0 if known.form == "mean" else 1 / max(float(known.count(y, n)), 1e-9) for _, y, n in parts]
    return [weight / len(parts) for weight in scale]


def share_of_samples(known: KnownLoss, parts: list[Any]) -> list[float]:
    scale = [1.0 if known.form == "mean" else 1 / max(float(known.count(y, n)), 1e-9) for _, y, n in parts]
    return [weight * n / SAMPLES for weight, (_, _, n) in zip(scale, parts, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mean_of_means_is_caught(case: Case) -> None:
    for loss_fn in built(case, "mean"):
        wanted, found = added_up(loss_fn, case, [3, 3, 1], mean_of_means)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("options", [{"ignore_index": 1}, {"weight": share(CLASSES)}])
def test_a_share_of_samples_is_caught_where_targets_weigh(options: dict[str, Any]) -> None:
    case = Case("cross_entropy", lambda: (real(SAMPLES, CLASSES, 3), labels(SAMPLES, 3, ignored=1)), options)
    wanted, found = added_up(partial(F.cross_entropy, **options), case, [3, 4], share_of_samples)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, wanted, **EXACT)


def losses_of_torch() -> set[str]:
    names = {name for name in vars(F) if re.search(r"loss|entropy|kl_div|divergence", name) and name[0] != "_"}
    return {name for name in names if isinstance(getattr(F, name), FunctionType)}


def test_every_loss_of_torch_has_a_case() -> None:
    assert set(nn.modules.loss.__all__) == {name for case in CASES for name in case.classes}
    assert losses_of_torch() == {case.function for case in CASES} == {entry.function for entry in ENTRIES}


def test_a_new_loss_of_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def brand_new_loss(input: Tensor, target: Tensor) -> Tensor:
        return input.sum()

    monkeypatch.setattr(F, "brand_new_loss", brand_new_loss, raising=False)
    with pytest.raises(AssertionError):
        test_every_loss_of_torch_has_a_case()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.function)
def test_every_option_of_torch_is_known(entry: Any) -> None:
    parameters = inspect.signature(getattr(F, entry.function)).parameters.values()
    optional = {p.name for p in parameters if p.default is not inspect.Parameter.empty}
    refused = {name for function, name in REFUSED if function == entry.function}
    assert optional - LEGACY - refused - {"reduction"} <= set(entry.options.split())
    own = {"bias", "device", "dtype", "in_features", "num_classes", "out_features"}
    own |= {"args", "kwargs"}  # NLLLoss2d is deprecated: its signature is that of the warning around it
    for name in entry.classes.split():
        given_by_class = set(inspect.signature(getattr(nn, name)).parameters)
        assert given_by_class - LEGACY - own - {"reduction"} <= set(entry.options.split())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_any_ignored_targets(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 8))
    sizes = [n for n in data.draw(st.lists(st.integers(1, 4), max_size=samples)) if n]
    while sum(sizes) > samples:
        sizes.pop()
    sizes += [samples - sum(sizes)] if sum(sizes) < samples else []
    ignored = data.draw(st.sampled_from([-100, 0, 3]))
    choice = st.one_of(st.just(ignored), st.integers(0, CLASSES - 1))
    targets = torch.tensor(
        data.draw(st.lists(st.lists(choice, min_size=2, max_size=2), min_size=samples, max_size=samples))
    )
    weight = data.draw(st.none() | st.lists(st.floats(0.1, 5), min_size=CLASSES, max_size=CLASSES))
    loss_fn = nn.CrossEntropyLoss(
        None if weight is None else torch.tensor(weight, dtype=torch.float64),
        ignore_index=ignored,
        label_smoothing=data.draw(st.sampled_from([0.0, 0.2])),
    )
    if (targets == ignored).all():
        return
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = real(samples, CLASSES, 2).requires_grad_()
    known, case = recognise(loss_fn), Case("cross_entropy", lambda: None)
    assert known is not None
    parts = pieces(case, logits, targets, sizes)
    added = sum(w * known.loss(x, y) for w, (x, y, _) in zip(weights_of(known, parts), parts, strict=True))
    whole = loss_fn(logits, targets)
    torch.testing.assert_close(added, whole, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(added, logits), torch.autograd.grad(whole, logits), **EXACT)


@pytest.mark.parametrize("weight", [None, share(CLASSES)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_micro_batch_without_targets_gives_zero(weight: Tensor | None, smoothing: float) -> None:
    known = recognise(nn.CrossEntropyLoss(weight, label_smoothing=smoothing))
    assert known is not None
    logits, targets = real(3, CLASSES).requires_grad_(), torch.full((3,), -100)
    loss = known.loss(logits, targets)
    loss.backward()
    assert float(loss) == 0 and float(known.count(targets, 3)) == 0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss()])
def test_a_mean_over_nothing_gives_zero(loss_fn: nn.Module) -> None:
    outputs, targets = real(0, 3).requires_grad_(), real(0, 3)
    known = recognise(loss_fn)
    assert known is not None and loss_fn(outputs, targets).isnan()
    assert float(known.loss(outputs, targets)) == 0 and known.count(targets, 0) == 0


def test_forms_and_units() -> None:
    def facts(loss_fn: Any) -> tuple[str, str, str]:
        known = recognise(loss_fn)
        assert known is not None
        return known.name, known.form, known.unit

    assert facts(nn.CrossEntropyLoss()) == ("CrossEntropyLoss", "sum", "target tokens")
    assert facts(nn.NLLLoss(share(5))) == ("NLLLoss", "sum", "class weights")
    assert facts(nn.KLDivLoss(reduction="batchmean")) == ("KLDivLoss", "sum", "samples")
    assert facts(F.mse_loss) == ("mse_loss", "mean", "elements")
    assert facts(nn.CTCLoss()) == ("CTCLoss", "mean", "samples")
    assert facts(partial(partial(F.l1_loss), reduction="sum")) == ("l1_loss", "total", "")
    assert facts(nn.MSELoss(size_average=False)) == ("MSELoss", "total", "")


def test_the_twin_shares_buffers_and_parameters_and_follows_them() -> None:
    loss_fn = nn.LinearCrossEntropyLoss(3, CLASSES, weight=torch.ones(CLASSES))
    known = recognise(loss_fn)
    assert known is not None
    loss_fn.double()
    loss_fn.weight.fill_(2.0)
    features, targets = real(4, 3), labels(4)
    known.loss(features, targets).backward()
    assert float(known.count(targets, 4)) == 8 and loss_fn.reduction == "mean"
    assert loss_fn.linear.weight.grad is not None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_call_loss_is_the_users_loss(case: Case) -> None:
    for loss_fn in built(case, "mean"):
        outputs, targets = case.make()
        wanted = case.call(loss_fn, outputs, targets)
        assert torch.equal(call_loss(loss_fn, outputs, targets), wanted)


def test_call_loss_leaves_unknown_callables_alone() -> None:
    assert call_loss(lambda outputs, targets: (outputs, targets), (1, 2), None) == ((1, 2), None)
    custom = nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).abs().sum(1))
    assert call_loss(custom, [real(3, 2) for _ in range(3)], None).dim() == 0


def without_reduction(loss_fn: Any) -> Any:
    if not isinstance(loss_fn, nn.Module):
        return partial(loss_fn, reduction="none")
    loss_fn = copy.copy(loss_fn)
    loss_fn.reduction = "none"
    return loss_fn


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_are_the_terms_of_the_mean_for_one_that_is_counted(case: Case) -> None:
    """Checked against the number of terms that the loss itself has without a reduction."""
    for loss_fn in built(case, "mean"):
        known = recognise(loss_fn)
        if known is None or known.copies is None:
            continue
        outputs, targets = case.make()
        terms = case.call(without_reduction(loss_fn), outputs, targets)
        assert known.copies(outputs, targets) * int(known.count(targets, SAMPLES)) == terms.numel()


def test_copies_of_nothing() -> None:
    known = recognise(nn.MSELoss())
    assert known is not None and known.copies is not None
    assert known.copies(real(0, 3), real(0, 3)) == known.copies(real(2, 0), real(2, 1)) == 0
    assert known.copies(real(2, 3), real(2, 3)) == known.copies(real(2, 1), real(2, 3)) == 1
    assert known.copies(real(2, 3), real(2, 1)) == 3
