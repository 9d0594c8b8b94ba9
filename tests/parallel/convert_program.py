"""`mar convert`, without its command line. Arguments: a checkpoint, the directory to write, and its
precision."""

import sys
from pathlib import Path

from megatron_async_rl.weights.convert import convert

convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
