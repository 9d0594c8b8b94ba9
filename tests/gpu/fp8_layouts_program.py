"""One rank of a layout that trains with FP8 GEMMs, compared with bfloat16 on the same rows; also a
resumed run with FP8 weights.

Arguments: cpu or cuda, the recipe, the ParallelConfig as JSON, the directory of the test data
(test_fp8.py), and the file that rank 0 writes. On a CPU it works like fp8_program.py.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_async_rl.config.policy import Fp8Config, ParallelConfig
from megatron_async_rl.policy import device
from tests.gpu.fp8_program import Fp8Rank, emulated, measured
from tests.parallel import objective_program
from tests.parallel.fp8_program import on_local_layers, on_rows_of
from tests.parallel.layout_program import save


def main() -> None:
    kind, recipe, parallel, material, name = sys.argv[1:]
    layout, output = ParallelConfig(**json.loads(parallel)), Path(name)
    rank = Fp8Rank(Path(material), layout, output.with_suffix(".scratch"), kind)
    rank.fp8 = Fp8Config(recipe=recipe)
    with ExitStack() as stack:
        if kind == "cpu":
            stack.enter_context(on_local_layers())
        rounded = rank.policy(lr=1e-3)
        usual = on_rows_of(rank.policy(lr=1e-3, fp8=None), rounded)
        with emulated(kind, recipe):
            found = {"fp8": measured(rank, rounded, "a")}
        found["bfloat16"] = measured(rank, usual, "a")
        found["layers"] = rounded.model.bridge.layers.name
        if not rank.fp8.facts.primary:
            rank.fp8 = Fp8Config(recipe=recipe, primary_weights=True)
            with emulated(kind, recipe):
                found["resumed"] = objective_program.resumed(rank, "tied", "a", "b")
    steps = [found[one]["step"] for one in ("fp8", "bfloat16")]
    save(rank, found, [steps], output)


if __name__ == "__main__":
    device.install(sys.argv[1])
    main()
