"""Train a small GPT with DeepSpeed at any ZeRO stage; its JSON chooses the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train_gpt_deepspeed.py
    deepspeed examples/gpt/train_gpt_deepspeed.py --deepspeed-config ds_config.json

``"type": "Dion"`` or ``"CurvaDion"`` only needs ``import curvadion.deepspeed``. Model, data,
schedule, log and summary are those of train_gpt.py.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import curvadion
import train_gpt
from checkpoint import Progress
from command_line import option, parse
from gpt import GPT, GPTConfig
from optional import need
from run_log import RunLog

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Config:
    """Train a small GPT with DeepSpeed."""

    deepspeed_config: str = option(
        str(HERE / "ds_config_zero2.json"), "DeepSpeed's JSON: optimizer, stage, batch size"
    )
    gate: Literal["json", "always", "rmmc"] = option(
        "json", "the JSON's optimizer and gate; always: Dion; rmmc: CurvaDion with RMMC(0.3)"
    )
    node_size: int = option(1, "ranks of a node, to count what crosses between nodes")
    out: str = option("runs/gpt-deepspeed", "folder of the log and the summary")
    seed: int = option(0, "seed of the weights and of the data order")
    data: tuple[str, ...] = option((), "text files and folders; default: Python's library")
    data_bytes: int = option(10_000_000, "maximum bytes of text to use")
    validation_tokens: int = option(16_384, "held-out tokens per evaluation, the same each time")
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "attention heads")
    dim: int = option(128, "width of the residual stream")
    context: int = option(128, "tokens in a sequence")
    steps: int = option(500, "optimizer steps")
    warmup_steps: int = option(20, "steps of linear learning-rate warm-up")
    validate_every: int = option(50, "steps between evaluations")
    progress: bool = option(True, "print the loss now and then")

    def json(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        settings: dict[str, Any] = json.loads(Path(self.deepspeed_config).read_text("utf-8"))
        optimizer = settings["optimizer"]
        if self.gate == "json":
            return settings
        for key in ("gate", "threshold", "wire_budget"):
            optimizer["params"].pop(key, None)
        if self.gate == "always":
            optimizer["type"] = "Dion"
        else:
            optimizer["type"] = "CurvaDion"
            optimizer["params"]["threshold"] = 0.3
        return settings

    def shared(self) -> train_gpt.Config:
        """Return the settings for train_gpt.py's functions."""
        settings = self.json()
        own = asdict(self)
        for key in ("deepspeed_config", "gate"):
            del own[key]
        return train_gpt.Config(
            **own,
            batch_size=settings["train_micro_batch_size_per_gpu"],
            accumulation=settings.get("gradient_accumulation_steps", 1),
        )


class Trainer:
    """An engine and its data: one rank's share of the training."""

    def __init__(self, config: Config, device: torch.device):
        deepspeed = need("deepspeed", "train_gpt_deepspeed.py")
        if device.type == "cpu":  # or DeepSpeed would first compile a shared-memory all-reduce
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        import curvadion.deepspeed  # DeepSpeed now knows the optimizer's type

        self.config, self.device = config.shared(), device
        self.batches, self.held_out, vocab_size = train_gpt.load_data(self.config)
        torch.manual_seed(config.seed)
        shape = GPTConfig(vocab_size, config.layers, config.heads, config.dim, tie=False)
        settings = config.json()
        self.replica_size: int | None = settings["optimizer"]["params"].get("replica_size")
        self.engine = deepspeed.initialize(model=GPT(shape), config=settings)[0]
        self.optimizer: curvadion.Dion = self.engine.basic_optimizer
        self.highest_lr = train_gpt.learning_rates(self.optimizer)

    def layout(self) -> dict[str, Any]:
        """Return the layout of the ranks, for the summary."""
        stage, world = self.engine.zero_optimization_stage(), dist.get_world_size()
        size = self.replica_size or (world if stage else 1)
        replicas, shards = world // size, size if stage else 1
        name = (
            f"ZeRO {stage}" if self.replica_size is None else f"ZeRO {stage}, {replicas} x {size}"
        )
        return {"name": name, "parallel": name, "replicas": replicas, "shards": shards}

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss: torch.Tensor = self.engine(inputs.to(self.device), targets.to(self.device))
        return loss

    def step(self, step: int) -> dict[str, Any]:
        """Take an optimizer step; return its training loss and its report."""
        scale = train_gpt.lr_scale(step, self.config)
        train_gpt.set_learning_rates(self.optimizer, self.highest_lr, scale)
        mean_loss = torch.zeros((), device=self.device)
        for batch in self.batches(step, dist.get_rank()):
            loss = self.loss(*batch)
            self.engine.backward(loss)
            self.engine.step()
            mean_loss += loss.detach() / self.config.accumulation
        if self.optimizer.report is None:
            raise RuntimeError("The engine has taken no step: is it another accumulation?")
        return {"loss": mean_loss, **train_gpt.decision(self.optimizer.report)}

    def validation_loss(self) -> float:
        """Return the held-out loss, averaged over the ranks."""
        return train_gpt.held_out_loss(self.engine, self.loss, self.held_out)

    def drift(self) -> float:
        """Return how far weights are from their mean; 0 with ZeRO 3, which leaves no whole ones."""
        return train_gpt.drift(self.engine.module.parameters(), dist.group.WORLD)


def count_steps(optimizer: curvadion.Dion, meter: curvadion.WireMeter, progress: Progress) -> None:
    """Count the bytes that the optimizer itself sends, without DeepSpeed's."""
    step: Callable[..., Any] = optimizer.step

    def counted(*args: Any) -> Any:
        sent = meter.total.bytes
        result = step(*args)
        progress.optimizer_bytes += meter.total.bytes - sent
        return result

    setattr(optimizer, "step", counted)  # noqa: B010


def train(config: Config, device: torch.device) -> dict[str, Any]:
    """Run the training that the configuration describes and return its summary."""
    trainer, progress = Trainer(config, device), Progress()
    first, out = dist.get_rank() == 0, Path(config.out)
    log = RunLog(out, after_step=0, tensorboard=False, active=first)
    with log, curvadion.WireMeter() as meter:
        count_steps(trainer.optimizer, meter, progress)
        while progress.step < config.steps:
            counted = train_gpt.Counted.by(meter, config.node_size)
            started = time.perf_counter()
            record = trainer.step(progress.step)
            progress.step += 1
            progress.seconds += time.perf_counter() - started
            counted.add_to(progress, meter)
            progress.open_gates += record["gate_open"]
            where = train_gpt.position(trainer.config, progress)
            with meter.paused():
                record["loss"] = train_gpt.mean_over_ranks(record["loss"])
                log.write("train", progress.step, **record, **where)
                if train_gpt.is_due(config.validate_every, trainer.config, progress):
                    progress.val_loss = trainer.validation_loss()
                    progress.drift = trainer.drift()
                    judged = {"val_loss": progress.val_loss, "drift": progress.drift}
                    log.write("validation", progress.step, **judged, **where)
                    if first and config.progress:
                        print(f"step {progress.step}: held-out loss {progress.val_loss:.4f}")
    summary = train_gpt.summarise(trainer.config, progress) | trainer.layout()
    if first:
        train_gpt.write_json(out / "config.json", asdict(config) | {"deepspeed": config.json()})
        train_gpt.write_json(out / "summary.json", summary)
    return summary


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with the command line's settings and return the summary."""
    given = sys.argv[1:] if arguments is None else arguments
    # DeepSpeed's launcher adds a flag whose value is also in the environment.
    config = parse(Config, [each for each in given if not each.startswith("--local_rank")])
    return train_gpt.launch(train, config)


if __name__ == "__main__":
    main()
