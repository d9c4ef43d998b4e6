"""JAX code with loops that never compiles the same thing twice."""

from loopjit import lax as lax
from loopjit.engine.state import (
    CacheInfo as CacheInfo,
    cache_clear as cache_clear,
    cache_info as cache_info,
)
from loopjit.errors import (
    LoopJitError as LoopJitError,
    LoopJitWarning as LoopJitWarning,
    StrictError as StrictError,
)
from loopjit.install import (
    install as install,
    installed as installed,
    uninstall as uninstall,
)
from loopjit.statics.report import LeafInfo as LeafInfo
from loopjit.transform import LoopJitted as LoopJitted, loop_jit as loop_jit

__version__ = "0.1.0"
