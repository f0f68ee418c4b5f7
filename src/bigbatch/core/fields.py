"""Decides what each field of a batch is (per sample, shared, or a list of fields) and cuts all at the same borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Number
from typing import Any

from bigbatch.core.packed import Ragged, cut_leaf, is_float_vector, refusal, rows
from bigbatch.core.tree import assembled, build_sequence, children, is_sequence, key_of, leaves, opened
from bigbatch.errors import SplitError

Field = tuple[str, int]  # path, samples
ROOTS = ("inputs", "targets")
SIMPLE = (str, int, float, bool, bytes)  # no list of these holds fields


@dataclass
class Known:
    """What is known of all batches: the words of `split`, sizes of the model's parameters, how fields were read so
    far, and the names in `split` that no batch has had yet."""

    words: Mapping[str, str]
    sizes: frozenset[int]
    read_as: dict[str, str] = field(default_factory=dict)
    unmet: set[str] = field(default_factory=set)


class Cutter:
    """One batch, and what is known of it.

    `samples` is fixed first, by the fields that allow one reading only. `cut` then goes through the batch once.
    """

    def __init__(self, inputs: Any, targets: Any, known: Known, asked: str) -> None:
        self.words, self.sizes, self.seen, self.asked = known.words, known.sizes, known.read_as, asked
        self.roots = {"inputs": inputs, "targets": targets}
        named_root = any(root in known.words for root in ROOTS)
        self.inner_keys = checked_keys(self.roots, known.unmet) if known.unmet or named_root else set()
        self.lists: list[tuple[str, Any]] = []  # lists whose reading is still open
        self.ragged: Ragged = {}
        self.borders: list[int] = []
        firm = [found for root, value in self.roots.items() for found in self.firm(value, root)]
        self.samples = agreed(firm, self.roots, asked) if firm else self.samples_of_lists()
        self.witness = firm[0][0] if firm else ""

    def word(self, path: str) -> str:
        """What `split` says of a field; a full path goes before a key, and an inner key before the name of a root."""
        if path in self.words and not (path in ROOTS and path in self.inner_keys):
            return self.words[path]
        return "" if path in ROOTS or not self.words else self.words.get(key_of(path), "")

    def firm(self, value: Any, path: str) -> Iterator[Field]:
        """The fields that allow one reading only, with their number of samples; the other lists are put aside."""
        word = self.word(path)
        if word == "shared":
            return
        if is_list(value, path) and word != "fields":
            if word == "samples":
                yield path, len(value)
            else:
                self.lists.append((path, value))
            return
        parts = opened(value)
        if parts is None:
            reason = refusal(value)
            size = None if reason else rows(value)
            if reason or (size is None and word):
                raise cannot_cut(path, reason or f"a {type(value).__name__} without a first axis", self.asked)
            if size is not None:
                yield path, size
            return
        if word == "samples":
            raise cannot_cut(path, f"a {type(value).__name__} and holds fields of its own", self.asked)
        for name, child in zip(parts.names, parts.values, strict=True):
            yield from self.firm(child, path + name)

    def samples_of_lists(self) -> int:
        """The number of samples of a batch that has nothing but lists to tell it by."""
        if not self.lists:
            do = "put at least one tensor with one row a sample into the batch, or pass split= a function"
            raise SplitError(self.asked, "no field of the batch has a first axis", do)
        found = sorted(set(sizes_inside(self.lists[0][1])))
        fitting = [size for size in found if all(self.readings(value, path, size) for path, value in self.lists)]
        if len(fitting) > 1:
            known = [(path, value) for path, value in self.lists if path in self.seen]
            fitting = [n for n in fitting if all(self.seen[path] in self.readings(v, path, n) for path, v in known)]
        if len(fitting) == 1:
            return fitting[0]
        names = [short(path, self.roots) for path, _ in self.lists]
        lengths = ", ".join(f"{name} of length {len(v)}" for name, (_, v) in zip(names, self.lists, strict=True))
        counts = " as well as ".join(map(str, fitting)) or "no number of"
        do = f'pass split={{"{names[0]}": "samples"}} if it holds one item a sample, or "fields" if one item a field'
        raise SplitError(self.asked, f"{counts} samples fit the lists: {lengths}", do)

    def readings(self, value: Any, path: str, samples: int) -> list[str]:
        """The ways to read a list that fit a number of samples."""
        word, found = self.word(path), []
        if len(value) == samples and word != "fields":
            found.append("samples")
        if word == "samples" or (word != "fields" and all(type(item) in SIMPLE for item in value)):
            return found
        if all(self.fits(item, f"{path}[{i}]", samples) for i, item in enumerate(value)) and (
            word == "fields" or any(rows(leaf) is not None for item in value for leaf in leaves(item))
        ):
            found.append("fields")
        return found

    def fits(self, value: Any, path: str, samples: int) -> bool:
        """Whether every tensor inside has `samples` rows."""
        if self.word(path) == "shared":
            return True
        if is_list(value, path):
            return bool(self.readings(value, path, samples))
        parts = opened(value)
        if parts is None:
            return refusal(value) is None and rows(value) in (None, samples)
        return all(
            self.fits(child, path + name, samples) for name, child in zip(parts.names, parts.values, strict=True)
        )

    def cut(self, value: Any, path: str) -> list[Any]:
        """The pieces of a field at `self.borders`."""
        spans = list(pairwise(self.borders))
        if self.word(path) == "shared":
            return [value] * len(spans)
        if is_list(value, path) and self.reading(value, path) == "samples":
            items, whole = list(value), len(spans) == 1
            return [value] if whole else [build_sequence(value, items[first:end]) for first, end in spans]
        parts = opened(value)
        if parts is None:
            return self.pieces_of_leaf(value, path)
        columns = [self.cut(child, path + name) for name, child in zip(parts.names, parts.values, strict=True)]
        rows_of_parts = zip(*columns, strict=True) if columns else [()] * len(spans)
        return [assembled(value, parts, row) for row in rows_of_parts]

    def reading(self, value: Any, path: str) -> str:
        """The one way to read a list; remembered, so that a later batch in which both ways fit is read alike."""
        found = self.readings(value, path, self.samples)
        known = self.word(path) or self.seen.get(path, found[0] if len(found) == 1 else "")
        if known in found:
            numbers = (
                len(self.borders) > 2
                and path not in ROOTS
                and isinstance(value, tuple)
                and all(isinstance(n, Number) for n in value)
            )
            if numbers and not self.word(path):
                raise doubtful(short(path, self.roots), f"is a tuple of {len(value)} numbers", self.asked)
            self.seen[path] = known
            return known
        if len(found) == 2 and len(self.borders) == 2:
            return "samples"  # One piece holds the list as it is, whatever it means.
        name = short(path, self.roots)
        if len(found) == 2:
            choice = f'pass split={{"{name}": "samples"}} or split={{"{name}": "fields"}}'
            both = f"{name} may hold {len(value)} samples as well as {len(value)} fields of {self.samples} samples each"
            raise SplitError(self.asked, both, choice)
        before = f"; earlier it held {self.seen[path]}" if path in self.seen else ""
        length = f"{name} is a {type(value).__name__} of length {len(value)}"
        witness = f"{short(self.witness, self.roots)} has" if self.witness else "the batch has"
        raise SplitError(f"{self.asked}{DISAGREE}", f"{witness} {self.samples} samples, {length}{before}", fix(name))

    def pieces_of_leaf(self, value: Any, path: str) -> list[Any]:
        size = rows(value)
        if size is None:
            return [value] * (len(self.borders) - 1)
        if is_float_vector(value) and path not in ROOTS and self.word(path) != "samples":
            if size not in self.sizes:
                self.seen[path] = "samples"
            elif path not in self.seen and len(self.borders) > 2:  # One piece holds it whole, whatever it means.
                found = f"has {size} numbers, as many as the batch has samples and as a parameter of the model has"
                raise doubtful(short(path, self.roots), found, self.asked)
        return cut_leaf(value, self.borders, self.ragged)


DISAGREE = " a batch whose fields disagree"  # goes on after "... was asked for"


def is_list(value: Any, path: str) -> bool:
    """Whether a value may be read in two ways; a tuple that is the whole of the inputs holds arguments."""
    return is_sequence(value) and not (path == "inputs" and isinstance(value, tuple))


def checked_keys(roots: Mapping[str, Any], unmet: set[str]) -> set[str]:
    """The keys of all fields; refuses a name in `split` that no field has and none had in an earlier batch."""
    found = [path for root, value in roots.items() for path in paths(value, root)]
    keys = {key_of(path) for path in found if path not in ROOTS}
    unmet -= {*found, *keys}
    if unmet:
        shown = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "")
        asked = f"split= names {', '.join(map(repr, sorted(unmet)))}"
        raise SplitError(asked, f"the batch has the fields {shown}", "name a field by its last key or its full path")
    return keys


def agreed(fields: Sequence[Field], roots: Mapping[str, Any], asked: str) -> int:
    """The number of samples that all fields have; the odd ones are refused by name."""
    usual = Counter(size for _, size in fields).most_common(1)[0][0]
    odd = [(short(path, roots), size) for path, size in fields if size != usual]
    if odd:
        witness = short(next(path for path, size in fields if size == usual), roots)
        others = ", ".join(f"{name} {size}" for name, size in odd[:4])
        raise SplitError(f"{asked}{DISAGREE}", f"{witness} has {usual} samples, {others}", fix(odd[0][0]))
    return usual


def fix(name: str) -> str:
    return f'fix the data, or pass split={{"{name}": "shared"}} if all samples share it'


def doubtful(name: str, found: str, asked: str) -> SplitError:
    do = f'pass split={{"{name}": "shared"}} or split={{"{name}": "samples"}}'
    return SplitError(asked, f"{name} {found}, so it cannot be told from a field that all samples share", do)


def cannot_cut(path: str, what: str, asked: str) -> SplitError:
    do = f'pass split={{"{key_of(path) or path}": "shared"}} if all samples share it, or split= a function'
    return SplitError(asked, f"{path} is {what}, which has no rows to cut", do)


def short(path: str, roots: Mapping[str, Any]) -> str:
    """The last key of a path where one field has it, otherwise the path."""
    key = key_of(path)
    same = sum(key_of(other) == key for root, value in roots.items() for other in paths(value, root)) if key else 0
    return key if same == 1 else path


def paths(value: Any, path: str) -> Iterator[str]:
    yield path
    for name, child in children(value) or ():
        yield from paths(child, path + name)


def sizes_inside(value: Any) -> Iterator[int]:
    """Numbers of samples that a field may be meant to have."""
    if is_sequence(value):
        yield len(value)
    parts = opened(value)
    if parts is None:
        size = None if refusal(value) else rows(value)
        yield from () if size is None else (size,)
        return
    for child in parts.values:
        yield from sizes_inside(child)
