"""Routing replay: every pass of a step sends its tokens to the experts that the step's first weights chose.

Routers finds the routers of a loaded mixture; RoutingReplay keeps the experts of a step's rollouts, for trainer.py.
The routers of transformers differ, but they choose alike: by torch.topk over the experts, called in the module that
holds the experts. So in that module, and while a pass is recorded or replayed, topk's result is noted or replaced.
All that follows, such as a softmax over the chosen, stays the architecture's own and keeps its gradient.
Source: arXiv 2507.18071, section 5.3.

Letters: N positions of the model's input, S of a rollout, I of several rollouts, E experts of a layer, K of them
chosen. C choices of a token are the K of each layer, side by side.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, __version__

from gspo.common.errors import InputError
from gspo.learner.model.batch import MicroBatch, StepBatch
from gspo.learner.model.network import hidden_states, in_evaluation
from gspo.learner.ranks.process_group import sum_over_ranks
from gspo.learner.ranks.sequence_ranks import SequenceRanks
from gspo_core.stats import Stats, mean_stats, merge

_TOPK = (torch.topk, Tensor.topk)
# An attribute that transformers, 5.16 to 5.19, gives to modules with the experts of a layer; peft's name of a wrapped
# module.
_EXPERTS, _WRAPPED = "is_concatenated", "base_layer"
# The largest number of experts whose numbers fit a byte.
_BYTE = 256
# A position that no rollout has: it takes the experts of the present router.
_OWN = -1
# Rollouts whose experts the ranks exchange at a time.
_ROWS_AT_A_TIME = 8
_TRIAL_TOKENS = 8

# (layer, number of the call in it, scores, topk itself) -> the result of topk.
_Handler = Callable[[int, int, Tensor, Callable[[], Any]], Any]


class _Choices(TorchFunctionMode):
    """A block in which a handler answers every topk."""

    def __init__(self, handler: Callable[[int, Tensor, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._handler, self._num_calls = handler, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(function, *args, **(kwargs or {}))
        if function not in _TOPK:
            return call()
        self._num_calls += 1
        return self._handler(self._num_calls - 1, args[0] if args else kwargs["input"], call)


class _Routed(NamedTuple):
    """One layer: the call of topk that chooses, its columns among the C, and E."""

    call: int
    columns: slice
    num_experts: int


class Routers:
    """The routers of a loaded mixture. A trial on a few tokens shows that their choices can be replaced.

    Attributes:
        num_experts: The most experts of a layer.

    Raises:
        InputError: The model has no experts, or chooses them in another way.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        self._handler: _Handler | None = None
        self._layers: dict[int, _Routed] = {}
        experts = [(name, module) for name, module in causal_lm.named_modules() if hasattr(module, _EXPERTS)]
        if not experts:
            raise _refusal(causal_lm, f"has no experts by the attributes of transformers {__version__}")
        for layer, (name, _) in enumerate(experts):
            holder = ".".join(part for part in name.split(".") if part != _WRAPPED).rpartition(".")[0]
            self._answer_topk(layer, causal_lm.get_submodule(holder))
        self._try(causal_lm, [module for _, module in experts])
        self.num_experts = max(routed.num_experts for routed in self._layers.values())

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """A block with one forward pass, whose choices [N, C] the yielded function then gives."""
        expert_NK: dict[int, Tensor] = {}

        def record(layer: int, call: int, _scores: Tensor, choose: Callable[[], Any]) -> Any:
            chosen = choose()
            if layer in self._layers and call == self._layers[layer].call:
                expert_NK[layer] = chosen.indices.flatten(0, -2)
            return chosen

        with self._handled(record):
            yield lambda: torch.cat([expert_NK[layer] for layer in self._layers], -1)

    @contextmanager
    def replaying(self, expert_NC: Tensor) -> Iterator[Tensor]:
        """A block whose passes take these experts; where a number is negative, those of the present router.

        Yields:
            Bool [N], filled by the passes: whether the present router chooses another set in any layer.
        """
        changed_N = torch.zeros(len(expert_NC), dtype=torch.bool, device=expert_NC.device)

        def replay(layer: int, call: int, scores: Tensor, choose: Callable[[], Any]) -> Any:
            if layer not in self._layers or call != self._layers[layer].call:
                return choose()
            with torch.no_grad():
                own = choose().indices
            recorded = expert_NC[:, self._layers[layer].columns].view_as(own)
            expert = torch.where(recorded < 0, own, recorded.long())
            changed_N.logical_or_((own.sort(-1)[0] != expert.sort(-1)[0]).any(-1).flatten())
            return torch.return_types.topk((scores.gather(-1, expert), expert))

        with self._handled(replay):
            yield changed_N

    @contextmanager
    def _handled(self, handler: _Handler) -> Iterator[None]:
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def _answer_topk(self, layer: int, module: nn.Module) -> None:
        """Not by hooks: the passes that gradient checkpointing repeats run in threads of their own."""
        forward = module.forward

        def answered(*args: Any, **kwargs: Any) -> Any:
            if self._handler is None:
                return forward(*args, **kwargs)
            with _Choices(partial(self._handler, layer)):
                return forward(*args, **kwargs)

        setattr(module, "forward", answered)  # noqa: B010 - a method of one module, which mypy forbids

    @torch.no_grad()
    def _try(self, causal_lm: PreTrainedModel, experts: list[nn.Module]) -> None:
        """Find the calls that choose, then replace every choice by other experts."""
        calls: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in range(len(experts))}

        def watch(layer: int, _call: int, scores: Tensor, choose: Callable[[], Any]) -> Any:
            chosen = choose()
            calls[layer].append((scores, chosen.indices))
            return chosen

        seen, num_choices = self._used_experts(causal_lm, experts, watch), 0
        for layer, (expert_NK, _) in seen.items():
            for call, (scores, indices) in enumerate(calls[layer]):
                if indices.shape == expert_NK.shape and torch.equal(indices, expert_NK):
                    columns = slice(num_choices, num_choices + expert_NK.shape[-1])
                    self._layers[layer] = _Routed(call, columns, scores.shape[-1])
            if layer not in self._layers:
                raise _refusal(causal_lm, "chooses experts without torch.topk over all of them")
            num_choices = self._layers[layer].columns.stop
        if not seen:
            raise _refusal(causal_lm, "used no experts in a trial")
        others = {layer: (seen[layer][0] + 1) % self._layers[layer].num_experts for layer in seen}
        with self.replaying(torch.cat(list(others.values()), -1)):
            used = self._used_experts(causal_lm, experts, self._handler)
        for layer, expert_NK in others.items():
            used_NK, weight_NK = used[layer]
            if not torch.equal(used_NK, expert_NK) or not bool((weight_NK != 0).all()):
                raise _refusal(causal_lm, "takes no experts but its router's own, or gives others no weight")

    def _used_experts(
        self, causal_lm: PreTrainedModel, experts: list[nn.Module], handler: _Handler | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer -> the experts and weights [N, K] that its experts' module gets in a pass."""
        used: dict[int, tuple[Tensor, Tensor]] = {}

        def note(layer: int, _module: nn.Module, args: Any) -> None:
            used[layer] = args[1:3]

        hooks = [module.register_forward_pre_hook(partial(note, layer)) for layer, module in enumerate(experts)]
        vocabulary, device = causal_lm.config.get_text_config().vocab_size, causal_lm.device
        token_RS = (torch.arange(2 * _TRIAL_TOKENS, device=device) * 7 % vocabulary).view(2, -1)
        self._handler = handler
        try:
            with in_evaluation(causal_lm):
                hidden_states(causal_lm, token_RS, None)
        finally:
            self._handler = None
            for hook in hooks:
                hook.remove()
        return used


def _refusal(causal_lm: PreTrainedModel, reason: str) -> InputError:
    return InputError("algorithm.routing_replay", f"learner, but {type(causal_lm).__name__} {reason}", "Set it to none")


class RoutingReplay:
    """The experts of a step's rollouts, in host memory. Without routers it does nothing.

    A position takes C bytes, or 2 C where a layer has more than 256 experts, on each rank that trains its rollout.

    Args:
        ranks: The ranks that share each line with this one; None where it has lines of its own.
        device: That of the ranks' backend.
    """

    def __init__(self, routers: Routers | None, ranks: SequenceRanks | None, device: torch.device) -> None:
        self._routers, self._ranks, self._device = routers, ranks, device
        self._lengths: list[int] = []
        self._expert_SC: dict[int, Tensor] = {}  # by the rollout's place in the step
        # Of the present update, and of the last one that was applied.
        self._stats: Stats = {}
        self._applied: Stats = {}

    def begin(self, batch: StepBatch) -> None:
        """Forget the step before; the next passes are of this one."""
        self._lengths, self._expert_SC = [len(sequence) for sequence in batch.sequences], {}
        self._stats, self._applied = {}, {}

    @contextmanager
    def recording(self, micro: MicroBatch) -> Iterator[None]:
        """A block with a pass over a micro-batch, whose experts are kept."""
        # If no token counts here, another rank has the same rollouts.
        if self._routers is None or not len(micro.state_N):
            yield
            return
        with self._routers.recording() as recorded:
            yield
        kept = torch.uint8 if self._routers.num_experts <= _BYTE else torch.int16
        self._expert_SC |= zip(micro.row_R.tolist(), self._rollouts(micro, recorded().to(kept).cpu()), strict=True)

    def share(self, micros: Collection[MicroBatch]) -> None:
        """Exchange the experts with all other ranks, and keep those of the rollouts in `micros`, which are this one's.

        Every rank makes this call, after its passes over its part of the step.
        """
        if self._routers is None or distributed.get_world_size() == 1:
            return
        needed = {row for micro in micros for row in micro.row_R.tolist()}
        own, self._expert_SC = self._expert_SC, {}
        some = next(iter(own.values()))
        for first in range(0, len(self._lengths), _ROWS_AT_A_TIME):
            rows = range(first, min(first + _ROWS_AT_A_TIME, len(self._lengths)))
            parts = [own.get(row, some.new_zeros(self._lengths[row], some.shape[1])) for row in rows]
            # Each position is 0 on every rank but one, so its bytes add up to themselves.
            summed = sum_over_ranks(torch.cat(parts).view(torch.uint8), self._device).view(some.dtype)
            split = torch.split(summed, [len(part) for part in parts])
            self._expert_SC |= {row: split[row - first].clone() for row in rows if row in needed}

    @contextmanager
    def around(self, micro: MicroBatch) -> Iterator[None]:
        """A block with the passes over a micro-batch, forward and backward, that take the recorded experts."""
        if self._routers is None:
            yield
            return
        with self._routers.replaying(self._of_input(micro).to(micro.input_RS.device)) as changed_N:
            yield
        place_N = micro.state_N
        if self._ranks is not None:
            length = micro.input_RS.shape[1]
            place_N = place_N[self._ranks.own_places(place_N, length)] % self._ranks.part_length(length)
        changed = changed_N[place_N].float()
        self._stats = merge([self._stats, mean_stats("experts_changed", changed, torch.ones_like(changed))])

    def end_update(self, problem: str) -> None:
        """Keep the sums of an update that was applied."""
        self._applied, self._stats = self._applied if problem else self._stats, {}

    def end(self) -> Stats:
        """For the last applied update: the share of this rank's counted tokens with other experts at present."""
        return self._applied

    def _rollouts(self, micro: MicroBatch, expert_NC: Tensor) -> list[Tensor]:
        """[S, C] of each rollout, from the positions of the model's input; 0 at those of other ranks."""
        if self._ranks is not None:
            part, expert_NC = expert_NC, expert_NC.new_zeros(micro.input_RS.numel(), expert_NC.shape[1])
            place = expert_NC[self._ranks.rank * len(part) :][: len(part)]
            place.copy_(part[: len(place)])
        lengths = [self._lengths[row] for row in micro.row_R.tolist()]
        return [row.clone() for row in torch.split(expert_NC[micro.place_I], lengths)]

    def _of_input(self, micro: MicroBatch) -> Tensor:
        """[N, C], int16, at the positions of the model's input; those that no rollout has are negative."""
        expert_IC = torch.cat([self._expert_SC[row].short() for row in micro.row_R.tolist()])
        expert_NC = expert_IC.new_full((micro.input_RS.numel(), expert_IC.shape[1]), _OWN)
        expert_NC[micro.place_I] = expert_IC
        if self._ranks is None:
            return expert_NC
        P = self._ranks.part_length(len(expert_NC))
        part = expert_NC[self._ranks.rank * P :][:P]
        return torch.cat([part, part.new_full((P - len(part), part.shape[1]), _OWN)])
