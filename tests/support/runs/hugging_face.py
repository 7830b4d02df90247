"""A tiny GPT-2, its data, and what a launcher tells Accelerate, in the process groups of a call."""

import os

import torch
import torch.distributed as dist

TOKENS, LENGTH, SAMPLES = 32, 8, 64


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, place):
        drawn = torch.randint(0, TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(place))
        # Trainer divides by the number of labels; the first is nobody's next token.
        return {"input_ids": drawn, "labels": torch.cat((torch.tensor([-100]), drawn[1:]))}


def gpt(dropout=0.0, **more):
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **ends, **more))


def whole(model):
    """Weights of any layout, as a copy."""
    each = getattr(model, "module", model).named_parameters()
    full = ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in each)
    return {name: p.detach().clone() for name, p in full}


def launch(device_kind="cpu"):
    """Forget what Accelerate knows of the last call; set what a launcher sets.

    device_kind: "gpu" lets Accelerate, which has FSDP on accelerators only, take gloo for one;
        "deepspeed" the same for DeepSpeed; "none" lets it find no backend, as on a CPU.
    """
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in [*os.environ]:
        if name in ranks or name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[name]
    if (world := dist.get_world_size()) > 1:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", OMP_NUM_THREADS="1")
    if not hasattr(PartialState, "before_tests"):
        PartialState.before_tests = PartialState._prepare_backend
    PartialState._prepare_backend = PartialState.before_tests
    found = {
        "gpu": ("gloo", DistributedType.MULTI_GPU),
        "deepspeed": ("gloo", DistributedType.NO),
        "none": (None, DistributedType.NO),
    }
    if device_kind in found:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_, **__: found[device_kind]
