"""Names of Megatron-Core and mbridge that these packages do not promise to keep."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_async_rl.policy import bridge, megatron_private, model
from tests.cases import looped
from tests.forked import python
from tests.parallel import layouts

PACKAGE = Path(megatron_private.__file__).parents[1]
FUNCTIONS = [(module, name) for module, names in megatron_private.NAMES.items() for name in names]
METHODS = [
    (owner, name)
    for table in (
        megatron_private.OVERRIDDEN,
        megatron_private.METHODS,
        bridge.MBRIDGE_METHODS,
        model.OVERRIDDEN,
    )
    for owner, names in table.items()
    for name in names
]
ASSIGNED = [(owner, name) for owner, names in megatron_private.ASSIGNED.items() for name in names]
GEMM = """
import importlib, os, sys
sys.modules["transformer_engine"] = None
import torch
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda number: None
from megatron_async_rl.policy import device, megatron_private
from megatron.core.transformer.moe import moe_utils
moe_utils.te_general_gemm = "as where Transformer Engine is installed"
importlib.reload(megatron_private)

def multiply(name):
    device.install(name)
    weight = torch.ones(4, 3, requires_grad=True)
    logits = moe_utils.router_gating_linear(torch.ones(2, 3), weight, None, torch.float32)
    logits.sum().backward()
    print(name, logits.tolist(), weight.grad.tolist(), flush=True)

for name in sys.argv[1:]:  # each in a process of its own: a device is installed once
    child = os.fork()
    if not child:
        multiply(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def found(path: str):
    """The module or class of that dotted name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


@looped(("module", "name"), FUNCTIONS)
def test_a_private_name_that_we_use_exists(module, name):
    assert hasattr(found(module), name)


@looped(("owner", "name"), METHODS)
def test_a_method_that_we_call_or_override_exists(owner, name):
    """A missing name would make an override that is never called."""
    assert hasattr(found(owner), name)


@looped(("owner", "name"), ASSIGNED)
def test_an_attribute_that_we_read_is_assigned(owner, name):
    wanted = [
        target
        for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(found(owner)))))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(ast.Module([node], []))
        if isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.ctx, ast.Store)
    ]
    assert wanted


def private_uses(path: Path) -> list[str]:
    """Names of the tables, and underscore names, that a file imports from Megatron or mbridge or
    reads of other objects."""
    own = ("self", "cls", "ctx", "super")
    uses = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("megatron.", "mbridge")
        ):
            uses += [
                alias.name
                for alias in node.names
                if alias.name.startswith("_") or (node.module, alias.name) in FUNCTIONS
            ]
        if isinstance(node, ast.Attribute) and node.attr in LISTED:
            owner = node.value
            if isinstance(owner, ast.Call):
                # super() in an override.
                owner = owner.func
            if not (isinstance(owner, ast.Name) and owner.id in own):
                uses.append(node.attr)
    return uses


LISTED = {name for _, name in (*FUNCTIONS, *METHODS) if name.startswith("_")}
LISTED |= {name for owner, name in ASSIGNED if "optimizer" in owner}


def test_no_other_module_uses_one():
    allowed = {"megatron_private.py", "bridge.py"}
    uses = {
        str(path.relative_to(PACKAGE)): private_uses(path)
        for path in PACKAGE.rglob("*.py")
        if path.name not in allowed
    }
    assert {path: names for path, names in uses.items() if names} == {}


def test_one_module_names_the_class_that_megatron_deprecates():
    naming = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bGPTModel\b|\bgpt_model\b", path.read_text())
    }
    assert naming == {"policy/model.py"}


def test_a_router_multiplies_without_transformer_engine():
    done = python(GEMM, "cpu", "cuda")
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = f"{[[3.0] * 4] * 2} {[[2.0] * 3] * 4}"
    said = [line for line in done.stdout.splitlines() if line.startswith(("cpu ", "cuda "))]
    assert said == [f"cpu {numbers}", f"cuda {numbers}"]


def test_a_gpus_attention_has_no_plans_of_cudnns():
    """cuDNN's would compile one for each shape and keep all of them."""
    program = """
import torch
assert torch.backends.cuda.cudnn_sdp_enabled()
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda number: None
from megatron_async_rl.policy import device
device.install("cuda")
assert not torch.backends.cuda.cudnn_sdp_enabled()
assert torch.backends.cuda.flash_sdp_enabled()
"""
    done = python(program)
    assert done.returncode == 0, done.stderr


KERNELS = """
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as classes

# As where Transformer Engine is installed, whose kernels refuse tensors of a CPU.
optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = None, False
distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = None, True
distrib_optimizer.USING_TE_OPTIMIZER = True
for module in (classes, clip_grads):
    module.multi_tensor_applier = module.multi_tensor_scale_impl = None
clip_grads.l2_norm_impl = None

from pathlib import Path
import sys, torch
from megatron_async_rl.policy import device
device.install("cpu")
from megatron_async_rl.config.policy import ParallelConfig
from tests.parallel.layout_program import Rank

rank = Rank(Path(sys.argv[1]), ParallelConfig(), Path(sys.argv[2]), "cpu")
policy = rank.policy(dtype="bfloat16")
before = rank.weights(policy)
(step,) = rank.train(policy, ["a"])["steps"]
after = rank.weights(policy)
print(step["policy/skipped"], any(not torch.equal(before[name], after[name]) for name in after))
print({group["fused"] for group in policy.optimizer.param_groups})
"""


def test_a_cpu_policy_uses_no_optimizer_kernel_of_transformer_engine(tmp_path):
    ended = python(KERNELS, layouts.material(), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["0.0 True", "{True}"]


def test_a_group_of_one_rank_exchanges_nothing():
    calls = []

    def collective(output, part, *, group, op):
        calls.append((group.size(), op))
        return op

    exchange = megatron_private._unless_alone(collective)
    alone, three = (SimpleNamespace(size=lambda size=size: size) for size in (1, 3))
    same, output, part = torch.ones(2), torch.zeros(2), torch.ones(2)
    version = same._version
    assert exchange(same, same, group=alone, op="sum") is None
    assert same._version == version, "its own memory is not copied"
    assert exchange(output, part, group=alone, op="sum") is None
    assert output.tolist() == [1, 1]
    assert calls == []
    assert exchange(output, part, group=three, op="sum") == "sum"
    assert calls == [(3, "sum")]
