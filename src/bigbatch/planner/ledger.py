"""The life of every storage in a piece of work: at which operator it is born and dies, its bytes, and its kind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bigbatch.core.live import dense_parts
from bigbatch.planner.scratch import Scratch

ACTIVATIONS, GRADIENTS, OUTPUTS = "activations", "gradients", "outputs and loss"
TEMPORARY, HOST = "temporary", "host"
# What is asked about values outside of the user's code, where a fake tensor has none to tell: any answer will do.
SCALARS = {int, float, bool, str, NoneType, torch.dtype, torch.device, torch.memory_format, torch.layout}
ANSWERS = {torch.ops.aten.equal.default: True, torch.ops.aten._local_scalar_dense.default: 1}


@dataclass
class Life:
    """A storage: alive from operator `born` on, and no longer once operator `dead` has begun; None while it lives."""

    size: int
    born: int
    kind: str
    dead: int | None = None


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the lives of all storages that are born inside, in the order of their births.

    What is born is temporary, until somebody names its kind. A storage that was there before does not count. Scratch
    space inside an operator is counted for those that `scratch` knows.

    Attributes:
        lives: one for each storage.
        now: operators so far.
        phases: what has begun after which operator.
        flops: floating-point operations of matrix products, convolutions and attention.

    >>> with Ledger() as ledger:
    ...     kept = torch.zeros(10) + 1
    >>> [(life.size, life.born, life.dead) for life in ledger.lives], ledger.now
    ([(40, 1, 3), (40, 2, None)], 2)
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scratch = scratch or Scratch(None)
        self.lives: list[Life] = []
        self.now = self.flops = 0
        self.phases: list[tuple[str, int]] = []
        self._known: dict[int, tuple[weakref.ref[Any], Life]] = {}
        self._kind = TEMPORARY
        self._gathering: int | None = None  # the storage that the engine adds a further gradient to
        self._asked = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled under a ledger; the wrapper would cost a tenth
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:  # asked by C++, and often
            return args[0].fake_device
        if func in ANSWERS and type(args[0]) is FakeTensor and not getattr(self._asked, "by_user", False):
            return ANSWERS[func]
        lift = func is torch.ops.aten.lift_fresh.default
        old = set() if lift else {storage._cdata for storage in storages((args, kwargs))}
        self.now += 1
        beside, sizes = self.scratch.of(func, args, kwargs)
        out = func(*args, **kwargs)
        self._gathering = gathering(func, args, out)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        larger = dict(zip(addresses(out), sizes, strict=False))
        for storage in storages(out):
            key = storage._cdata
            if key not in old and key not in self._known:
                life = Life(max(storage.nbytes(), larger.get(key, 0)), self.now, self._kind)
                self.lives.append(life)
                self._known[key] = (weakref.ref(storage, partial(self._dies, key)), life)
        if beside:
            self.lives.append(Life(beside, self.now, TEMPORARY, self.now + 1))
        return out

    def begins(self, phase: str) -> None:
        """What follows belongs to this phase."""
        self.phases.append((phase, self.now))

    def name(self, tensors: Any, kind: str) -> None:
        """Says of what kind the storages of some tensors are."""
        for storage in storages(tensors):
            if storage._cdata in self._known:
                self._known[storage._cdata][1].kind = kind

    def name_rest(self, kind: str, born_after: int) -> None:
        """Says of what kind all storages are that live now, were born after an operator, and have no kind yet."""
        for _, life in self._known.values():
            if life.kind == TEMPORARY and life.born > born_after:
                life.kind = kind

    @contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        """What is born inside is of this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def in_user_code(self) -> Iterator[None]:
        """Whoever asks for a value inside depends on it: nothing is made up, and a fake tensor raises its error."""
        before = getattr(self._asked, "by_user", False)
        self._asked.by_user = True
        try:
            yield
        finally:
            self._asked.by_user = before

    def _dies(self, key: int, _: Any) -> None:
        self._known.pop(key)[1].dead = self.now + (key != self._gathering)


def gathering(func: Any, args: tuple[Any, ...], out: Any) -> int | None:
    """The storage that autograd adds a further gradient to in place, which it does not under a mode like this one.

    It is a sum in a backward without a graph, whose first part nobody else holds: a view's base would. Whoever dies in
    the sum has become it.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    first = args[0]
    return None if first._is_view() or first.nbytes != out.nbytes else first.untyped_storage()._cdata


def addresses(tree: Any) -> list[int]:
    """The address of each leaf's storage; 0 where a leaf is no tensor."""
    return [leaf.untyped_storage()._cdata if isinstance(leaf, Tensor) else 0 for leaf in tree_leaves(tree)]


def storages(tree: Any) -> Iterator[Any]:
    """Every storage of the tensors in a tree."""
    if isinstance(tree, Tensor):
        for part in dense_parts(tree):
            yield part.untyped_storage()
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from storages(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from storages(value)
    elif type(tree) not in SCALARS:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                yield from storages(leaf)


def bytes_of_all(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(list(tensors))}.values())
