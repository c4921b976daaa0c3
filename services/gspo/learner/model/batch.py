"""The rollouts of a step as tensors, cut into micro-batches for the model: padded, or packed one after another.

A branch of a rollout is a sequence of its own for the model; an ordinary rollout has one.

Letters: B rollouts that count, T positions after the prompt, S positions of the model's input, N counted tokens. I are
the positions of some rollouts' inputs, one rollout after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo.learner.assembly.rows import Row
from gspo_core.kept_logprobs import NO_TOKEN
from gspo_core.packing import micro_batches, packed_micro_batches


class Branch(NamedTuple):
    """A branch in which a token counts, as the model reads it.

    Attributes:
        number: In its rollout, from 0; the first one begins with the prompt.
        length: Tokens of its input: its context and what follows, up to the token before the last one that counts.
        num_counted: Its tokens that count.
    """

    number: int
    length: int
    num_counted: int


@dataclass(frozen=True)
class StepBatch:
    """The rollouts that a step trains on. Rows that were skipped, or of which no token counts, are not in it.

    Attributes:
        sequences: Per rollout, the model's input: that of each of its branches, one after another.
        branches: Per rollout, those in which a token counts.
        states: Per rollout, for each token that counts, the place in `sequences` of the state that predicts it.
        mask_BT: The tokens that count; behavior_BT and version_BT mean nothing elsewhere.
        mini_batch_B: The optimizer step of each rollout.
        branch_BT: The number of each token's branch, from 0; None where sequences of the formulas are whole rollouts.
        temperature_B: That of each rollout's sampling; None where all have the run's.
        kept: Per rollout, the ids that each token that counts was sampled from, [counted tokens, K], filled up with
            NO_TOKEN. K is that of all rollouts, so that sums over it do not depend on the micro-batch. None where
            sampling cuts nothing.
    """

    rows: tuple[Row, ...]
    sequences: tuple[Tensor, ...]
    branches: tuple[tuple[Branch, ...], ...]
    states: tuple[Tensor, ...]
    token_BT: Tensor
    behavior_BT: Tensor
    version_BT: Tensor
    mask_BT: Tensor
    mini_batch_B: Tensor
    branch_BT: Tensor | None = None
    temperature_B: Tensor | None = None
    kept: tuple[Tensor, ...] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Row], *, by_branch: bool = False, own_temperatures: bool = False) -> StepBatch:
        """The batch of rows in training order.

        Args:
            by_branch: Whether a branch is a sequence of the formulas (algorithm.ratio_of).
            own_temperatures: Whether each rollout may have a temperature of its own (agent.sampling, data.sources).

        Raises:
            ValueError: A branch has no context, so that no state predicts its first token.
        """
        trained = tuple(row for row in rows if row.skipped is None and row.mask.any())
        inputs = [_model_input(row) for row in trained]
        return cls(
            rows=trained,
            sequences=tuple(token_S for token_S, _, _ in inputs),
            branches=tuple(branches for _, branches, _ in inputs),
            states=tuple(state_N for _, _, state_N in inputs),
            token_BT=_side_by_side([row.token_ids for row in trained]).long(),
            behavior_BT=_side_by_side([row.logp for row in trained]).float(),
            version_BT=_side_by_side([row.version for row in trained]).long(),
            mask_BT=_side_by_side([row.mask for row in trained]).bool(),
            mini_batch_B=torch.tensor([row.mini_batch for row in trained], dtype=torch.long),
            branch_BT=_side_by_side([_branch_numbers(row) for row in trained]).long() if by_branch else None,
            temperature_B=torch.tensor([row.temperature for row in trained]).float() if own_temperatures else None,
            kept=_kept(trained),
        )

    @property
    def teacher_BT(self) -> Tensor:
        """The log-probs by a teacher at an address, which the rows have."""
        return _side_by_side([row.teacher_logp for row in self.rows]).float()

    @property
    def turn_BT(self) -> Tensor:
        """The number of each sampled token's turn in a conversation, from 0; without meaning elsewhere."""
        return _side_by_side([_turn_numbers(row) for row in self.rows]).long()

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class PackedBlock:
    """Adjacent branches of a line, of similar length, as R rows of S positions.

    Attributes:
        first, last: Their positions in the line, last excluded.
        row_place_N: For each of the R * S places, its position in the block; behind a row's end, any position of that
            row. None if every row is S long.
        line_place_N: For each position of the block, its place among the R * S.
    """

    first: int
    last: int
    num_rows: int
    width: int
    row_place_N: Tensor | None
    line_place_N: Tensor | None

    @classmethod
    def of(cls, first: int, lengths: Sequence[int]) -> PackedBlock:
        """The block of branches of these lengths that starts at `first`."""
        R, S, last = len(lengths), max(lengths), first + sum(lengths)
        if last - first == R * S:
            return cls(first, last, R, S, None, None)
        length_R = torch.tensor(lengths)
        place_S, start_R = torch.arange(S), length_R.cumsum(0) - length_R
        inside_RS = place_S < length_R[:, None]
        row_place_RS = start_R[:, None] + torch.where(inside_RS, place_S, 0)
        return cls(first, last, R, S, row_place_RS.flatten(), inside_RS.flatten().nonzero()[:, 0])

    def to(self, device: torch.device) -> PackedBlock:
        """The same with its places on `device`."""
        if self.row_place_N is None or self.line_place_N is None:
            return self
        return replace(self, row_place_N=self.row_place_N.to(device), line_place_N=self.line_place_N.to(device))

    def to_rows(self, line: Tensor) -> Tensor:
        """[positions of the line, ...] to [R, S, ...]: this block's rows, with finite values behind their ends."""
        part = line[self.first : self.last]
        if self.row_place_N is not None:
            part = _ToRows.apply(part, self.row_place_N, self.line_place_N)  # type: ignore[no-untyped-call]
        return part.reshape(self.num_rows, self.width, *line.shape[1:])

    def to_line(self, rows: Tensor) -> Tensor:
        """[R, S, ...] to this block's [positions, ...]; places behind the rows' ends get no gradient."""
        flat = rows.reshape(self.num_rows * self.width, *rows.shape[2:])
        return flat if self.line_place_N is None else flat.index_select(0, self.line_place_N)


class _ToRows(torch.autograd.Function):
    """index_select with an index_select as gradient: each position has one place that counts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, row_place_N: Tensor, line_place_N: Tensor) -> Tensor:
        ctx.line_place_N = line_place_N
        return part.index_select(0, row_place_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.index_select(0, ctx.line_place_N), None, None


@dataclass(frozen=True)
class PackedRollouts:
    """A line of rollouts' branches, the longest first, each read for itself.

    Attributes:
        position_S: Every position's place in its own branch, from 0.
        bound_N: The first position of each branch, and the end of the last, int32: as torch's variable-length
            attention takes them.
        longest: Positions of the longest branch.
    """

    position_S: Tensor
    blocks: tuple[PackedBlock, ...]
    bound_N: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], max_padded: int) -> PackedRollouts:
        """Pack branches of these lengths, in descending order, one after another.

        Args:
            max_padded: Most places of a block; a longer branch is a block of its own.
        """
        position_S = torch.cat([torch.arange(length) for length in lengths])
        blocks, first = [], 0
        for rows in micro_batches(lengths, max(max_padded, *lengths)):
            block = PackedBlock.of(first, [lengths[row] for row in rows])
            blocks.append(block)
            first = block.last
        bound_N = torch.tensor([0, *lengths]).cumsum(0).int()
        return cls(position_S, tuple(blocks), bound_N, max(lengths))

    def to(self, device: torch.device) -> PackedRollouts:
        """The same with its places on `device`."""
        blocks = tuple(block.to(device) for block in self.blocks)
        return PackedRollouts(self.position_S.to(device), blocks, self.bound_N.to(device), self.longest)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward: R of the step's rollouts.

    Packed, their branches follow one another in one row; otherwise each branch is a row of its own, padded on the
    right, which causal attention ignores.

    Attributes:
        row_R: Their places in the step.
        place_I: For each position of their inputs, its flat place in `input_RS`.
        input_RS: Token ids; R is 1 where branches are packed, and otherwise their number.
        line: The branches' places in the packed row; None if they are padded.
        state_N: For each counted token, the flat place in [R, S] of the state that predicts it.
        target_N: The counted tokens.
        mask_RT: Their places among the answers' positions, up to the longest here.
        backward: Whether its loss has a gradient.
        temperature_N: That of each counted token's sampling; None where it is the run's.
        kept_NK: The ids that each counted token was sampled from; None where sampling cuts nothing.
    """

    row_R: Tensor
    place_I: Tensor
    input_RS: Tensor
    line: PackedRollouts | None
    state_N: Tensor
    target_N: Tensor
    mask_RT: Tensor
    backward: bool
    temperature_N: Tensor | None = None
    kept_NK: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The inputs of model and loss on `device`; the places in the step's own tensors stay where those are."""
        names = ("input_RS", "state_N", "target_N", "mask_RT", "temperature_N", "kept_NK")
        tensors = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, line=self.line.to(device) if self.line else None, **tensors)

    def without_counted(self) -> MicroBatch:
        """The same input, in which no token counts."""
        names = ("state_N", "target_N", "temperature_N", "kept_NK")
        nothing = {name: tensor[:0] for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, mask_RT=torch.zeros_like(self.mask_RT), **nothing)

    @property
    def model_input(self) -> tuple[Any, ...]:
        """The arguments of PolicyModel's forward."""
        return self.input_RS, self.line, self.state_N, self.target_N, self.temperature_N, self.kept_NK

    @property
    def width(self) -> int:
        """T of this micro-batch."""
        return self.mask_RT.shape[1]

    def take(self, matrix_BT: Tensor) -> Tensor:
        """This micro-batch's part [R, T] of a matrix of the whole step; for a mask there is `take_mask`."""
        return matrix_BT[self.row_R, : self.width].to(self.mask_RT.device)

    def take_mask(self, mask_BT: Tensor) -> Tensor:
        """This micro-batch's part [R, T] of a mask of the whole step; False in a row that is not counted here."""
        return self.take(mask_BT) & self.mask_RT

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of counted tokens at their places in [R, T], 0 elsewhere. Differentiable."""
        return values_N.new_zeros(self.mask_RT.shape).masked_scatter(self.mask_RT, values_N)


def rank_micro_batches(
    batch: StepBatch,
    rows: Sequence[int],
    max_tokens: int,
    *,
    rank: int,
    num_ranks: int,
    packing: bool,
    backward: bool = True,
    counted: bool = True,
) -> list[MicroBatch]:
    """Cut some rows of a step into this rank's micro-batches of at most max_tokens, with their padding.

    The rows, the longest first, are dealt out to the ranks, so that all have similar work. Collective calls demand the
    same number of micro-batches on every rank: one with fewer gets more of them in which no token counts.

    Args:
        packing: Pack rows one after another; otherwise pad them.
        backward: Whether the loss of these rows has a gradient.
        counted: Whether their tokens count; otherwise they only bring a gradient of zero.
    """
    ordered = sorted(rows, key=lambda row: -len(batch.sequences[row]))
    cuts = []
    for r in range(num_ranks):
        own = ordered[r::num_ranks]
        if packing:
            cut = packed_micro_batches([len(batch.sequences[row]) for row in own], max_tokens)
        else:
            longest = [max(branch.length for branch in batch.branches[row]) for row in own]
            cut = micro_batches(longest, max_tokens, [len(batch.branches[row]) for row in own])
        cuts.append([[own[i] for i in part] for part in cut])
    missing = max(map(len, cuts)) - len(cuts[rank])
    parts = cuts[rank] + [ordered[-1:]] * missing
    micros = [_micro_batch(batch, part, max_tokens if packing else None, backward) for part in parts]
    first_empty = len(cuts[rank]) if counted else 0
    return micros[:first_empty] + [micro.without_counted() for micro in micros[first_empty:]]


def positions_of(batch: StepBatch, row: int, *, packing: bool) -> int:
    """Positions of a micro-batch of this rollout alone."""
    lengths = [branch.length for branch in batch.branches[row]]
    return sum(lengths) if packing else len(lengths) * max(lengths)


def _side_by_side(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """[B, T], filled up with 0 on the right; the mask is one of the arrays, and tells the values from the filling."""
    tensors = [torch.as_tensor(array) for array in arrays]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) if tensors else torch.zeros(0, 0)


def _model_input(row: Row) -> tuple[Tensor, tuple[Branch, ...], Tensor]:
    """A row's `sequences`, `branches` and `states`. The last token that counts in a branch is only predicted."""
    where = f"rollout {row.group}-{row.number}"
    if not len(row.prompt_token_ids):
        raise ValueError(f"{where}: the prompt has no token")
    token_ids, branches, states, num_before = [], [], [], 0
    for number, (start, end) in enumerate(row.branch_bounds):
        counted_N = start + np.flatnonzero(row.mask[start:end])
        if not len(counted_N):
            continue
        context = row.prompt_token_ids if number == 0 else row.prompt_token_ids[:0]
        before_N = len(context) + counted_N - start  # tokens of the branch before each
        if not before_N[0]:
            raise ValueError(f"{where}: branch {number} begins with a token of the policy")
        token_ids += [context, row.token_ids[start : counted_N[-1]]]
        branches.append(Branch(number, int(before_N[-1]), len(counted_N)))
        states.append(num_before + before_N - 1)
        num_before += int(before_N[-1])
    token_S, state_N = (torch.as_tensor(np.concatenate(parts)).long() for parts in (token_ids, states))
    return token_S, tuple(branches), state_N


def _kept(rows: Sequence[Row]) -> tuple[Tensor, ...] | None:
    """The sets of `StepBatch.kept`."""
    widest = max((int(row.kept_sizes.max(initial=0)) for row in rows), default=0)
    if not widest:
        return None
    kept = []
    for row in rows:
        kept_TK = np.full((len(row.token_ids), widest), NO_TOKEN, dtype=np.int32)
        kept_TK[np.arange(widest) < row.kept_sizes[:, None]] = row.kept_ids
        kept.append(torch.as_tensor(kept_TK[row.mask]))
    return tuple(kept)


def _branch_numbers(row: Row) -> NDArray[np.int64]:
    return np.searchsorted(row.branch_starts, np.arange(len(row.token_ids)), side="right")


def _turn_numbers(row: Row) -> NDArray[np.int64]:
    """A turn is a run of sampled tokens: the next one begins behind an observation, or with a further branch."""
    is_sampled = row.version >= 0
    begins = is_sampled & ~np.roll(is_sampled, 1)
    begins[:1] = is_sampled[:1]
    begins[row.branch_starts] |= is_sampled[row.branch_starts]
    numbers: NDArray[np.int64] = np.maximum(np.cumsum(begins) - 1, 0)
    return numbers


def _micro_batch(batch: StepBatch, rows: Sequence[int], packed_tokens: int | None, backward: bool) -> MicroBatch:
    row_R = torch.tensor(rows, dtype=torch.long)
    lengths = [branch.length for row in rows for branch in batch.branches[row]]
    line, num_rows, width = None, len(lengths), max(lengths)
    starts = [number * width for number in range(num_rows)]
    if packed_tokens:
        longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        line = PackedRollouts.of([lengths[number] for number in longest_first], packed_tokens)
        num_rows, width = 1, sum(lengths)
        for number, start in zip(longest_first, line.bound_N.tolist(), strict=False):
            starts[number] = start
    place_I = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    input_I = torch.cat([batch.sequences[row] for row in rows])
    input_RS = input_I.new_zeros(num_rows * width).index_copy(0, place_I, input_I).view(num_rows, width)
    first_R = np.cumsum([0, *(len(batch.sequences[row]) for row in rows)])
    state_N = place_I[torch.cat([int(first) + batch.states[row] for first, row in zip(first_R, rows, strict=False)])]
    mask_RT = batch.mask_BT[row_R]
    mask_RT = mask_RT[:, : int(mask_RT.any(0).nonzero()[-1]) + 1]
    target_N = batch.token_BT[row_R, : mask_RT.shape[1]][mask_RT]
    temperature_N = None
    if batch.temperature_B is not None:
        temperature_N = batch.temperature_B[row_R].repeat_interleave(mask_RT.sum(1))
    kept_NK = None if batch.kept is None else torch.cat([batch.kept[row] for row in rows])
    return MicroBatch(row_R, place_I, input_RS, line, state_N, target_N, mask_RT, backward, temperature_N, kept_NK)
