"""For every test: one thread per process, since tests start several; and no clock on properties, since cores are shared."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")
