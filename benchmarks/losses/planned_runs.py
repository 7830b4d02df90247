"""The runs that train_processes.py makes: every method, budget and rate of a grid."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common import sent_elements
from benchmarks.common.tasks import SIZES, Task


@dataclass(frozen=True)
class Run:
    """One training; with the code, these values determine it.

    Attributes:
        size: name of the task.
        task: the task.
        method: one of ``METHODS``.
        settings: keyword arguments of the method.
        budget: the share of AdamW-DDP's bytes that the settings must keep to, if any.
        lr: the highest learning rate; that of matrices if the method treats them separately.
        seed: of the weights and of the data order.
        steps: optimizer steps.
        replicas: processes, each with its own data.
    """

    size: str
    task: Task
    method: str
    lr: float
    seed: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    budget: float | None = None
    replicas: int = 8

    @property
    def slug(self) -> str:
        """A file name, unique among the runs of the grids."""
        settings = "".join(f"-{key}{value:g}" for key, value in self.settings.items())
        rest = f"-lr{self.lr:g}-seed{self.seed}-{self.replicas}x{self.steps}"
        corpus = "" if self.task.corpus == "python" else f"-{self.task.corpus}"
        return f"{self.size}{corpus}-{self.method}{settings}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Variant:
    """A method with its settings, chosen for a budget if there is one."""

    method: str
    settings: dict[str, Any]
    budget: float | None = None


IN_FULL = ("small", "medium")
ELEMENTWISE = "elementwise"  # the setting that is tuned with the learning rate
BUDGETS = (0.1, 0.03, 0.01, 0.003)
IN_PARTS = (0.01,)  # budgets at which synchronising one fragment at a time may help
DION_RANKS = (1.0, 1 / 4, 1 / 8, 1 / 16)
STEPS = {"quick": 240, "full": 1000}
# At least three per method, a factor of two apart. If the best is the first or the last, try more
# with --lr.
_ADAMW, _DION, _FAR_APART = (2e-3, 4e-3, 8e-3), (0.02, 0.04, 0.08), (0.01, 0.02, 0.04)
LEARNING_RATES = {
    "adamw": _ADAMW,
    "powersgd": _ADAMW,
    "diloco_adamw": _ADAMW,
    "dion": _DION,
    "dion_nesterov": _DION,
    "muon": _DION,
    "diloco_dion": _FAR_APART,
    "averaged_weights": _DION,
    "averaging": _FAR_APART,
    "published": _FAR_APART,
    "authors": _FAR_APART,
    "ours": _DION,
    "ours_low_rank": _DION,
    "coded_gradients": _DION,
    "torch_muon": _FAR_APART,
    **dict.fromkeys(("replicated_adamw", "averaged_adamw"), _ADAMW),
    **dict.fromkeys(("replicated_muon", "averaged_muon"), _FAR_APART),
}
TORCHS = ("torch_muon", "replicated_muon", "averaged_muon")  # set their other rates themselves
# Rates of the AdamW parameters beside Dion, as shares of the matrices'. AdamW divides by the root
# mean square of its gradients, which is larger if gradients are not averaged first.
ELEMENTWISE_LR = {
    method: (0.75,) if method.startswith("ours") else (0.5,)
    for method, rates in LEARNING_RATES.items()
    if rates is not _ADAMW and method not in TORCHS
}
QUICK_BUDGETED = (
    "diloco_adamw",
    "diloco_dion",
    "averaged_weights",
    "ours",
    "ours_low_rank",
)


@dataclass(frozen=True)
class Choice:
    """Overrides of a grid's own choices; empty or None keeps the grid's."""

    seeds: Sequence[int] = ()
    lrs: Sequence[float] = ()
    elementwise: Sequence[float] = ()
    steps: int | None = None
    budgets: Sequence[float] = ()  # of full; 0 means methods without a budget

    def rates(self, method: str, *, middle: bool) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield a method's learning rates, each with its settings."""
        own = LEARNING_RATES[method]
        for lr in self.lrs or (own[1:2] if middle else own):
            if method not in ELEMENTWISE_LR:
                yield lr, {}
                continue
            for elementwise in self.elementwise or ELEMENTWISE_LR[method]:
                yield lr, {ELEMENTWISE: elementwise}


def within_budget(shapes: sent_elements.Shapes, budget: float, steps: int) -> Iterator[Variant]:
    """Yield the methods that fit a budget, with the settings that use most of it."""
    if rank := sent_elements.powersgd_rank(shapes, budget, steps):
        yield Variant("powersgd", {"rank": rank}, budget)
    if period := sent_elements.period_within(budget, steps, shapes.parameters, shapes.parameters):
        for method in ("diloco_adamw", "diloco_dion", "averaged_weights"):
            yield Variant(method, {"period": period}, budget)
    if period := sent_elements.averaging_period(shapes, budget, steps):
        yield Variant("averaging", {"period": period}, budget)
    if bits := sent_elements.gradient_bits(shapes, budget):
        yield Variant("coded_gradients", {"bits": bits}, budget)
    for method, parts in ("ours", 1), ("ours", 3), ("ours_low_rank", 1):
        if parts == 1 or budget in IN_PARTS:
            spent = sent_elements.spending(shapes, budget, steps, parts=parts)
            yield Variant(method, asdict(spent), budget)


def every_variant(
    shapes: sent_elements.Shapes, steps: int, budgets: Sequence[float] = BUDGETS
) -> Iterator[Variant]:
    """Yield every method, once for each budget that it follows and can meet."""
    yield Variant("adamw", {})
    for rank_fraction in DION_RANKS:
        yield Variant("dion", {"rank_fraction": rank_fraction})
    yield Variant("dion_nesterov", {"rank_fraction": DION_RANKS[0]})
    yield Variant("muon", {})
    yield Variant("published", {})
    yield Variant("authors", {})
    for budget in filter(None, budgets):
        yield from within_budget(shapes, budget, steps)


def full(replicas: int, choice: Choice = Choice()) -> Iterator[Run]:
    """Yield both sizes, every method and budget; seeds outermost, so all advance together."""
    steps = choice.steps or STEPS["full"]
    for seed in choice.seeds or (0, 1, 2):
        for size in IN_FULL:
            task = SIZES[size]
            for variant in every_variant(task.shapes(), steps, choice.budgets or BUDGETS):
                for lr, rates in choice.rates(variant.method, middle=False):
                    yield _run(size, variant, lr, rates, seed, steps, replicas)


def quick(replicas: int, choice: Choice = Choice()) -> Iterator[Run]:
    """Yield shorter runs of one size, with one budget and learning rate per method."""
    steps, shapes = choice.steps or STEPS["quick"], SIZES["small"].shapes()
    budgets = {
        0.1: ("powersgd", "coded_gradients"),
        0.03: ("averaging", "ours"),
        0.01: QUICK_BUDGETED,
    }
    variants = [
        Variant("adamw", {}),
        *(Variant("dion", {"rank_fraction": rank}) for rank in DION_RANKS[:2]),
        Variant("dion_nesterov", {"rank_fraction": DION_RANKS[0]}),
        Variant("muon", {}),
        Variant("published", {}),
        Variant("authors", {}),
        *(
            variant
            for budget, methods in budgets.items()
            for variant in within_budget(shapes, budget, steps)
            if variant.method in methods and variant.settings.get("parts", 1) == 1
        ),
    ]
    for seed in choice.seeds or (0,):
        for variant in variants:
            for lr, rates in choice.rates(variant.method, middle=True):
                yield _run("small", variant, lr, rates, seed, steps, replicas)


def inside(replicas: int, choice: Choice = Choice()) -> Iterator[Run]:
    """Yield torch's AdamW and Muon: synchronous, averaged exactly, and inside the outer layer."""
    steps = choice.steps or STEPS["quick"]
    for seed in choice.seeds or (0,):
        for name in ("adamw", "muon"):
            variants = [
                Variant("adamw" if name == "adamw" else "torch_muon", {}),
                *(Variant(f"averaged_{name}", {"period": period}) for period in (6, 100)),
                *(
                    Variant(f"replicated_{name}", {"wire_budget": budget}, budget)
                    for budget in choice.budgets or (0.01, 0.1)
                ),
            ]
            for variant in variants:
                for lr, rates in choice.rates(variant.method, middle=False):
                    yield _run("small", variant, lr, rates, seed, steps, replicas)


def _run(
    size: str,
    variant: Variant,
    lr: float,
    rates: dict[str, float],
    seed: int,
    steps: int,
    replicas: int,
) -> Run:
    """Return a run of a variant.

    Args:
        size: a key of SIZES.
        variant: of the grid.
        lr: the learning rate of matrices.
        rates: settings that give other parameters theirs.
        seed: of the weights and of the data order.
        steps: of the run.
        replicas: how many.
    """
    return Run(
        size=size,
        task=SIZES[size],
        method=variant.method,
        settings={**variant.settings, **rates},
        budget=variant.budget,
        lr=lr,
        seed=seed,
        steps=steps,
        replicas=replicas,
    )


GRIDS = {"quick": quick, "full": full, "inside": inside}
