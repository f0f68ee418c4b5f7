"""What a loss of torch.nn must not be weighed by: options and shapes that are refused, or left unknown."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bigbatch.core.losses import recognise
from bigbatch.errors import LossError
from loss_cases import CLASSES, labels, real, share, signs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_narrow_class_weights_are_added_wide() -> None:
    known = recognise(nn.CrossEntropyLoss(torch.ones(CLASSES, dtype=torch.bfloat16)))
    assert known is not None
    assert float(known.count(torch.zeros(4097, dtype=torch.long), 4097)) == 4097


def test_bytes_are_compared_as_numbers() -> None:
    known = recognise(F.nll_loss)
    weighed = recognise(partial(F.nll_loss, weight=torch.full((200,), 2.0)))
    assert known is not None and weighed is not None
    targets = torch.tensor([156, 1, 0], dtype=torch.uint8)
    assert int(known.count(targets, 3)) == 3 and float(weighed.count(targets, 3)) == 6
    losses = F.nll_loss(torch.ones(3, 200), targets, reduction="none")
    assert losses.count_nonzero() == 3


@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.CrossEntropyLoss(reduction="none"), nn.CTCLoss(reduction="none")])
def test_no_reduction_is_refused(loss_fn: Any) -> None:
    loss_fn = partial(loss_fn, reduction="none") if isinstance(loss_fn, FunctionType) else loss_fn
    with pytest.raises(LossError, match="reduction='none'.*Do: pass reduction='mean'"):
        recognise(loss_fn)


class Doubled(nn.MSELoss):
    """A subclass may do anything."""


def hooked() -> nn.Module:
    loss_fn = nn.MSELoss()
    loss_fn.register_forward_hook(lambda module, inputs, output: output.sqrt())
    return loss_fn


def overridden() -> nn.Module:
    loss_fn = nn.MSELoss()
    loss_fn.forward = lambda input, target: input.std()
    return loss_fn


UNKNOWN = {
    "lambda": lambda outputs, targets: F.mse_loss(outputs, targets),
    "subclass": Doubled(),
    "hooks": hooked(),
    "forward": overridden(),
    "positional": partial(F.mse_loss, torch.zeros(2)),
    "legacy": partial(F.mse_loss, size_average=False),
    "element weights": partial(F.mse_loss, weight=torch.ones(4, 2)),
    "bce weights": nn.BCELoss(weight=torch.ones(4)),
    "logit weights": partial(F.binary_cross_entropy_with_logits, weight=torch.ones(4, 1)),
    "variances": partial(F.gaussian_nll_loss, var=torch.ones(4)),
    "trained weights": partial(F.cross_entropy, weight=torch.ones(4, requires_grad=True)),
    "distance": nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).var().expand(len(x))),
    "bound targets": partial(F.mse_loss, target=torch.ones(4)),
    "no reduction of torch": partial(F.mse_loss, reduction="batchmean"),
    "another module": nn.Linear(2, 2),
    "nothing": None,
    "no hash": [],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_certain_is_unknown(name: str) -> None:
    assert recognise(UNKNOWN[name]) is None


TIED = {
    "column and row": (nn.MSELoss(), real(4, 1), real(4)),
    "square": (nn.L1Loss(reduction="sum"), real(4, 4), real(4)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), real(4, 1), real(4)),
    "pos_weight of samples": (nn.BCEWithLogitsLoss(pos_weight=share(4)), real(4), share(4)),
    "weight of samples": (nn.MultiLabelSoftMarginLoss(weight=share(4, 3)), real(4, 3), share(4, 3)),
    "one distribution": (nn.CrossEntropyLoss(reduction="sum"), real(4), share(4)),
    "one sample": (nn.MultiLabelMarginLoss(), real(4), torch.tensor([1, -1, 0, 0])),
    "ranking": (nn.MarginRankingLoss(), (real(4, 1), real(1, 4)), signs(4, 1)),
    "tokens in triplets": (nn.TripletMarginLoss(), (real(4, 3, 2),) * 3, None),
    "unbatched ctc": (nn.CTCLoss(), real(8, 3), (labels(4), torch.tensor(8), torch.tensor(4))),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_samples_are_refused(name: str) -> None:
    loss_fn, outputs, targets = TIED[name]
    known = recognise(loss_fn)
    assert known is not None
    with pytest.raises(LossError, match="add up over micro-batches"):
        known.loss(outputs, targets)


@pytest.mark.parametrize("targets", [{"labels": torch.zeros(2)}, None, [torch.zeros(2)], torch.tensor(1.0)])
def test_targets_of_another_kind_are_refused(targets: Any) -> None:
    for loss_fn in (nn.CrossEntropyLoss(), nn.MSELoss(), nn.MultiMarginLoss(), nn.MultiLabelSoftMarginLoss()):
        known = recognise(loss_fn)
        assert known is not None
        with pytest.raises(LossError, match="Found: "):
            known.count(targets, 2)
    known = recognise(nn.CTCLoss())
    assert known is not None
    with pytest.raises(LossError, match="Found: the lengths"):
        known.count({"lengths": 1}, 2)


def test_terms_tell_how_many_triplets_there_are() -> None:
    known = recognise(nn.TripletMarginLoss())
    assert known is not None and known.terms is not None
    assert known.terms((real(9, 2), real(9, 2), real(9, 2))) == 9 and known.count(None, 4) == 4
