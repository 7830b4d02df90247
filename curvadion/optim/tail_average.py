"""A partial average of the last weights, which replicas compute without exchanging anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from curvadion import checks
from curvadion.comm.collectives import chunks
from curvadion.layout.dtensor import fsdp_groups, is_dtensor, local, placements_of
from curvadion.layout.flat_shard import flat_shard
from curvadion.optim.checkpoint import check_values
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.torch_inner import owner_of
from curvadion.plan.parameter import names, product_dtype
from curvadion.plan.state import ANCHOR

# The entries of a state_dict.
STEPS = "steps"  # of the run, when it was saved
AVERAGED_AT = "averaged_at"  # the step at which the average last moved; None before it begins
COUNT = "count"  # of averages, so that a loss of some is noticed
AVERAGES = "averages"  # by parameter name


class TailAverage:
    """A partial average of the last weights, for evaluations and for the end of a run.

    While the learning rate has not decayed to zero, the mean of the last weights has a lower
    loss than the last weights. A part of the way to the mean is better than all of it:

        E <- decay^k E + (1 - decay^k) X       k: steps since E last moved
        W  = (1 - blend) X + blend E           what :meth:`averaged` puts in the place of X

    Make one beside the optimizer. It listens to the optimizer's steps, so nothing has to be
    called in the loop, and works under Trainer, Accelerate and Lightning::

        tail = curvadion.TailAverage(optimizer, start=4 * total_steps // 5)
        ...
        with tail.averaged():
            evaluate(model)

    It sends nothing: X are weights that all replicas have in common, so E and W are identical
    on all of them. If replicas hold equal weights at every step (one replica, Dion,
    CodedGradients, any torch optimizer with DDP or FSDP2), they are the weights, and k = 1.
    Otherwise they are what replicas agreed on at the last opening (the anchors, or with
    LowRank the averaged weights), and k is the number of steps between two openings. A step
    that is skipped because of a gradient that is not finite moves no weights, so that nothing
    of it enters E; it counts in k, as in ``optimizer.progress.steps``.

    All parameters of the optimizer are averaged, except frozen ones until they are trained. E
    is float32 for weights of half precision, otherwise of their dtype, and sharded like them.
    It takes memory from ``start`` on. Buffers, such as those of batch norm, are not averaged.

    It cannot be copied or pickled, because a copy of the optimizer would not call the copy: make
    one beside that, and load :meth:`state_dict` into it.

    Args:
        optimizer: any torch.optim.Optimizer whose parameters are those with which the model
            computes, also with DDP, FSDP2 or ZeroRedundancyOptimizer, but not with FSDP1 or
            DeepSpeed, which compute with copies. Not the wrapper of a framework, and of a
            Replicated not the optimizer inside.
        start: the number of steps after which E begins with the weights of then; about
            5 / (1 - decay) steps before the end are enough. For a CurvaDion, Dion or
            Replicated steps are ``optimizer.progress.steps``, for other optimizers calls of
            ``step`` since this object was made.
        decay: weight that E keeps at each step, in [0, 1). The horizon 1 / (1 - decay) should
            be about 4 % of the run: ``1 - 25 / total_steps``. The default is for 600 steps.
        blend: the share of E in W, in [0, 1]; it may be assigned at any time.

    Attributes:
        start, decay, blend: as they were passed.
        parameters: the optimizer's present ones, by name.

    Raises:
        TypeError, ValueError: naming the argument and its value. The first step raises a
            ValueError for the flat shards of FSDP1 and DeepSpeed, for the optimizer inside a
            Replicated, and for two parameters of the same name.
    """

    def __init__(
        self, optimizer: Optimizer, *, start: int, decay: float = 0.96, blend: float = 0.6
    ) -> None:
        # Wrappers of frameworks are Optimizers, but have no hooks.
        hooks = "_optimizer_step_pre_hooks"
        if not isinstance(optimizer, Optimizer) or hooks not in vars(optimizer):
            raise TypeError(
                f"optimizer={type(optimizer).__name__} must be a torch.optim.Optimizer itself: "
                f"of a framework's wrapper pass the attribute .optimizer."
            )
        checks.integer("start", start, 0)
        checks.number("decay", decay, below=1.0)
        checks.number("blend", blend, most=1.0)
        if isinstance(optimizer, ReplicaOptimizer) and not optimizer.sync.ends_drift:
            raise ValueError(
                f"optimizer has sync={optimizer.sync!r}, after whose openings replicas still "
                f"differ: there are no common weights to average."
            )
        self.start = start
        self.decay = decay
        self.blend = blend
        self._optimizer = optimizer
        self._calls = 0  # of step()
        self._checked = False  # whether these parameters and their steps are those of the run
        self._averaged_at: int | None = None  # the step at which E last moved
        self._averages: dict[Tensor, Tensor] = {}  # E, by parameter
        # Before a step and not after it, so that what comes between two steps is seen, too:
        # synchronize(), and the opening by which an elastic replica joins.
        optimizer.register_step_pre_hook(self._before_step)

    # --- the average

    @_disable_dynamo  # a compiled step would be compiled again for each count
    def _before_step(self, *_: object) -> None:
        self._check_outside("step()")
        if not self._checked:
            self._check_optimizer()
        if self._synchronised and (self._averaged_at is not None or self._steps >= self.start):
            self._move()
        self._calls += 1

    def _check_optimizer(self) -> None:
        """Raise ValueError if its weights are not the model's, or not all that it knows of them."""
        if owner_of(self._optimizer) is not None:
            raise ValueError(
                f"optimizer={type(self._optimizer).__name__} is inside Replicated, which alone "
                f"knows the weights that replicas have in common: make TailAverage of Replicated."
            )
        for name, X in self.parameters.items():
            if flat_shard(X) is not None or getattr(X, "_fsdp_flattened", False):
                raise ValueError(
                    f"{name} is a flat shard of FSDP1 or DeepSpeed, whose models compute with "
                    f"copies of it: a TailAverage needs DDP or FSDP2 (fully_shard)."
                )
        self._checked = True

    @torch.inference_mode(False)  # later steps write into E
    @torch.no_grad()
    def _move(self) -> None:
        """Move E to the common weights, and begin it where it has not begun."""
        steps = self._steps_since_move
        if self._averaged_at is not None and steps == 0:
            return
        moving = []
        weights = []
        for X in self.parameters.values():
            common = self._common(X)
            if X in self._averages:
                moving.append(local(self._averages[X]))
                weights.append(local(common))
            elif X.requires_grad:
                self._averages[X] = common.to(product_dtype(X), copy=True)
        done = 0
        for averages in chunks(moving):
            X_of_chunk = weights[done : done + len(averages)]
            done += len(averages)
            X_wide = [x.to(E.dtype) for x, E in zip(X_of_chunk, averages, strict=True)]
            # E <- decay^k E + (1 - decay^k) X
            torch._foreach_lerp_(averages, X_wide, 1.0 - self.decay**steps)
        self._averaged_at = self._steps

    def begin(self) -> None:
        """Begin now with the present common weights, if ``start`` has not come yet.

        Call it before torch.distributed.checkpoint loads a state that was saved after
        ``start``: that writes into the tensors of :meth:`state_dict`, which must be there.

        Raises:
            RuntimeError: inside :meth:`averaged`, and while replicas have no weights in
                common.
        """
        self._check_outside("begin()")
        self._check_common()
        if self._averaged_at is None:
            self._move()

    @property
    def _steps(self) -> int:
        """How many steps the run has taken, the same on all replicas."""
        if isinstance(self._optimizer, ReplicaOptimizer):
            return self._optimizer.progress.steps
        return self._calls

    @property
    def _steps_since_move(self) -> int:
        """k, if E moves now; 0 before it begins."""
        if self._averaged_at is None:
            return 0
        steps = self._steps - self._averaged_at
        if steps < 0:
            raise RuntimeError(
                f"The optimizer counts {self._steps} steps, but the average has moved at step "
                f"{self._averaged_at}: load both from the same checkpoint, and pass tail=tail to "
                f"start() of replicas that come and go."
            )
        return steps

    @property
    def _synchronised(self) -> bool:
        """Whether the common weights are those of now, and not of an earlier opening."""
        optimizer = self._optimizer
        if not isinstance(optimizer, ReplicaOptimizer) or not optimizer.drifted:
            return True
        # With fragments or a delay replicas differ even after an opening, but anchors do not.
        # With a delay these are of the opening before.
        return self._anchored and optimizer.progress.local_steps == 0

    @property
    def _anchored(self) -> bool:
        """Whether there are several replicas, which have weights in common as anchors."""
        optimizer = self._optimizer
        if not isinstance(optimizer, ReplicaOptimizer) or optimizer.replicas.size == 1:
            return False
        return any(key.name == ANCHOR for key in optimizer.sync.state_keys)

    def _anchor(self, X: Tensor) -> Tensor | None:
        """The anchor of X; None if the weights themselves are what replicas have in common."""
        optimizer = self._optimizer
        # Frozen weights are equal on all replicas, and their anchors may be out of date.
        if not isinstance(optimizer, ReplicaOptimizer) or not self._anchored or not X.requires_grad:
            return None
        return optimizer.inner.states.get(X, {}).get(ANCHOR)

    def _common(self, X: Tensor) -> Tensor:
        """The last weights that replicas have in common; like X, in float32 if from an anchor."""
        anchor = self._anchor(X)
        return X.detach() if anchor is None else anchor

    def _check_common(self) -> None:
        """Raise RuntimeError if replicas have drifted and keep no weights in common."""
        optimizer = self._optimizer
        if isinstance(optimizer, ReplicaOptimizer) and optimizer.drifted and not self._anchored:
            raise RuntimeError(
                f"The replicas have drifted, and sync={optimizer.sync!r} keeps no weights that "
                f"they have in common: call optimizer.synchronize() on all ranks first."
            )

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The optimizer's present parameters, by name; ValueError if two have the same."""
        found: dict[str, Tensor] = {}
        for position, group in enumerate(self._optimizer.param_groups):
            for name, X in zip(names(group, position), group["params"], strict=True):
                if name in found:
                    raise ValueError(
                        f"optimizer has two parameters of the name {name!r}: give each its own, or "
                        f"pass parameters() instead of named_parameters()."
                    )
                found[name] = X
        return found

    # --- using it

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put W in the place of the weights, and the same bits back at the end.

        Before ``start``, W are the common weights themselves, so that one loop of evaluations
        serves a whole run. If replicas have drifted, the common weights are those of the last
        opening: all replicas evaluate the same model, without the steps that they have taken
        since. Call ``optimizer.synchronize()`` before, and X are the newest weights.

        It changes nothing of the run, sends nothing, and takes the memory of a copy of the
        weights. So one rank alone may enter it to save W, if it holds all of the weights.

        With FSDP2, weights that a forward pass has left gathered are gathered anew. Weights
        that are loaded inside are lost at the end.

        Raises:
            RuntimeError: inside another ``averaged()`` of the same optimizer; if replicas have
                drifted under a sync without anchors. ``step``, ``synchronize`` and
                :meth:`apply_` inside raise it, too.
        """
        self._check_outside("averaged()")
        self._check_common()
        replaced: list[tuple[Tensor, Tensor]] = []  # weights, and this rank's shards of them
        optimizer: Any = self._optimizer
        optimizer.holds_average = True
        try:
            self._replace(replaced)
            yield
        finally:
            with torch.no_grad():
                for X, shard in reversed(replaced):
                    local(X.detach()).copy_(shard)
            optimizer.holds_average = False
            self._drop_gathered()

    @torch.no_grad()
    def _replace(self, replaced: list[tuple[Tensor, Tensor]]) -> None:
        """Put W in the place of the weights, and append what it replaces.

        Weights may share storage. So all W are computed before one is written, and who puts the
        weights back begins with the last.
        """
        blends = [(X, W.to(X.dtype)) for X, W in self._blends()]
        while blends:  # each is freed once it is written
            X, W = blends.pop()
            replaced.append((X, local(X.detach()).clone()))
            local(X.detach()).copy_(W)
        self._drop_gathered()

    @torch.no_grad()
    def apply_(self) -> None:
        """Keep W as the weights, at the end of a run; call it on all ranks.

        Replicas must not have drifted, so that no step is lost: call
        ``optimizer.synchronize()`` before. Anchors become W, too, and E is dropped; steps after
        this begin a new average.

        Raises:
            RuntimeError: if replicas have drifted, if E has not begun, or inside
                :meth:`averaged` of the same optimizer.
        """
        self._check_outside("apply_()")
        optimizer = self._optimizer
        if isinstance(optimizer, ReplicaOptimizer) and optimizer.drifted:
            raise RuntimeError(
                "The replicas have drifted: call optimizer.synchronize() on all ranks before "
                "tail.apply_()."
            )
        if not self._averages:
            raise RuntimeError(
                f"There is no average after {self._steps} steps: apply_() drops it, and it begins "
                f"after start={self.start!r} steps, which must be fewer than those of the run."
            )
        for X, W in list(self._blends()):  # all before one is written, as in averaged()
            local(X.detach()).copy_(W)
            anchor = self._anchor(X)
            if anchor is not None:
                local(anchor).copy_(W)
        self._drop_gathered()
        self._averages = {}
        self._averaged_at = None

    def _blends(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters whose W is not X, and this rank's shards of W."""
        for X in self.parameters.values():
            W = self._blended(X)
            if W is not None:
                yield X, W

    def _blended(self, X: Tensor) -> Tensor | None:
        """W, this rank's shard; None if it is X."""
        E = self._averages.get(X)
        anchor = self._anchor(X)
        if E is None:
            return None if anchor is None else local(anchor)
        steps = self._steps_since_move if self._synchronised else 0
        average = local(E)
        common = local(self._common(X)).to(average.dtype)
        # W = (1 - blend) X + blend (decay^k E + (1 - decay^k) X), without moving E
        return torch.lerp(common, average, self.blend * self.decay**steps)

    def _check_outside(self, call: str) -> None:
        """Raise RuntimeError while this or another average has replaced the weights."""
        # The optimizer has the mark, so that a ReplicaOptimizer refuses to synchronise.
        if getattr(self._optimizer, "holds_average", False):
            raise RuntimeError(f"{call} inside tail.averaged(): leave that context before.")

    def _drop_gathered(self) -> None:
        """Let FSDP2 gather weights again that a forward pass without a backward has gathered.

        It keeps those of the root module, and would compute with their earlier values.
        """
        own = set(self.parameters.values())
        if not any(map(is_dtensor, own)):
            return
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule

        for module in list(_module_state_mapping):
            if not isinstance(module, FSDPModule):
                continue
            for group in fsdp_groups(module):
                if any(p.sharded_param in own for p in group.fsdp_params):
                    group.reshard()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes; its tensors are the live ones, as in torch.

        The tensors are E by parameter name, in ``averages``; before E begins there are none.
        A DTensor's average is a DTensor, which torch.distributed.checkpoint also loads into
        another layout.
        """
        averages = {}
        for name, X in self.parameters.items():
            if X in self._averages:
                averages[name] = self._averages[X]
        return {
            STEPS: self._steps,
            AVERAGED_AT: self._averaged_at,
            COUNT: len(averages),
            AVERAGES: averages,
        }

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A TailAverage cannot be copied or pickled: make one for the copy of the optimizer, "
            "and call its load_state_dict(tail.state_dict())."
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned, after the optimizer has loaded its own.

        Raises:
            ValueError: if it is incomplete, damaged or of another model or layout; nothing
                has changed then.
        """
        saved = _checked(state_dict)
        parameters = self.parameters
        for name, average in saved[AVERAGES].items():
            if name not in parameters:
                raise ValueError(
                    f"state_dict has an average of {name!r}, which is no parameter of this "
                    f"optimizer: build the optimizer as in the run that saved it."
                )
            _check_average(name, parameters[name], average)
        averages: dict[Tensor, Tensor] = {}
        for name, average in saved[AVERAGES].items():
            X = parameters[name]
            E = self._averages.get(X)
            if E is None:
                E = X.detach().to(product_dtype(X), copy=True)
            local(E).copy_(local(average))
            averages[X] = E
        self._averages = averages
        self._averaged_at = saved[AVERAGED_AT]
        self._calls = saved[STEPS]


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same; ValueError if its entries are not those of a state."""
    expected = {STEPS, AVERAGED_AT, COUNT, AVERAGES}
    if not isinstance(state_dict, Mapping) or set(state_dict) != expected:
        entries = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise ValueError(
            f"state_dict has the entries {entries!r} instead of {sorted(expected)}: it is no "
            f"state of a TailAverage."
        )
    averages = state_dict[AVERAGES]
    averaged_at = state_dict[AVERAGED_AT]
    try:
        checks.integer(STEPS, state_dict[STEPS], 0, checks.LARGEST_COUNTER)
        checks.integer(COUNT, state_dict[COUNT], 0)
        if averaged_at is not None:
            checks.integer(AVERAGED_AT, averaged_at, 0, state_dict[STEPS])
    except TypeError as error:
        raise ValueError(f"state_dict is damaged: {error}") from error
    if not isinstance(averages, Mapping):
        raise ValueError(f"state_dict[{AVERAGES!r}] must be a dictionary, not {averages!r}")
    if len(averages) != state_dict[COUNT]:
        raise ValueError(
            f"state_dict has averages of {len(averages)} parameters instead of "
            f"{state_dict[COUNT]}: for torch.distributed.checkpoint call tail.begin() before "
            f"tail.state_dict()."
        )
    if averages and averaged_at is None:
        raise ValueError(f"state_dict has averages, but {AVERAGED_AT}=None: it is damaged")
    return state_dict


def _check_average(name: str, X: Tensor, average: Any) -> None:
    """Raise ValueError unless a saved average is one of a parameter, and finite.

    Args:
        name: of the parameter.
        X: the parameter.
        average: that was saved for it.
    """
    wanted = f"{product_dtype(X)} {tuple(X.shape)} {placements_of(X)}"
    found = repr(average)
    if isinstance(average, Tensor):
        found = f"{average.dtype} {tuple(average.shape)} {placements_of(average)}"
    if found != wanted:
        raise ValueError(
            f"state_dict has an average of {name} that is {found} instead of {wanted}: load it "
            f"into the same model and layout, or with torch.distributed.checkpoint."
        )
    if local(average).shape != local(X).shape:
        raise ValueError(
            f"state_dict has a shard of {tuple(local(average).shape)} of the average of {name} "
            f"instead of {tuple(local(X).shape)}: let each rank load its own."
        )
    check_values(name, {"average": average})
