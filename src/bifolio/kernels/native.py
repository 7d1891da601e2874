"""The kernel set in C++: `NativeOps`, made of one part per family of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bifolio.errors import ConfigError, UnsupportedError
from bifolio.kernels.huge_pages import Region
from bifolio.kernels.native_attention import AttentionOps
from bifolio.kernels.native_convert import ConvertOps
from bifolio.kernels.native_grouped import NativeGroupedOps
from bifolio.kernels.native_latent import NativeLatentOps
from bifolio.kernels.native_linear import LinearOps
from bifolio.kernels.native_pages import PageOps
from bifolio.kernels.native_sampling import NativeSampling
from bifolio.kernels.packing import load_native
from bifolio.kernels.result_arena import Arena
from bifolio.machine import default_threads

if TYPE_CHECKING:
    from bifolio import _native

ISA_VARIABLE = "BIFOLIO_ISA"
"""Environment variable that forces an instruction set: portable, avx2 or avx512."""


class Tape:
    """A recorded pass: `replay()` makes its kernel calls again, on the same memory."""

    def __init__(self, runtime: _native.Runtime) -> None:
        self._runtime = runtime
        self._calls: _native.Tape | None = None

    def __len__(self) -> int:
        """Number of kernel calls."""
        return len(self._calls) if self._calls is not None else 0

    def replay(self) -> None:
        assert self._calls is not None, "a tape can be replayed once its recording has ended"
        self._runtime.replay(self._calls)


class NativeOps(
    LinearOps, AttentionOps, NativeSampling, NativeGroupedOps, NativeLatentOps, PageOps, ConvertOps
):
    """Implements `Ops` on the CPU with kernels picked once for this processor.

    `threads` counts the calling thread; 0 takes `machine.default_threads`. `isa` is `auto`,
    `portable`, `avx2` or `avx512`; without it the environment variable BIFOLIO_ISA decides. Not for
    use from two threads at a time.

    Memory: a result lives in an arena and its memory is taken again once the tensor (and every
    view of it) is gone. All results, also those that are still held, may be overwritten when the
    next pass begins, be it plain, recorded or replayed. Inputs of a pass must be other memory.

    Recording: a pass of the same shapes makes the same kernel calls, so it can be made once by
    Python and repeated natively, as with a CUDA graph:

        with ops.record() as tape:      # runs the pass, and notes its kernel calls
            logits = model(batch)
        …                               # refill the tensors of `batch` in place
        tape.replay()                   # the new result stands in the same `logits`

    Everything that a recorded call reads must stay alive and in place: weights, the pool, the
    tensors of the batch. What Python computed in between (shapes, scalars such as `max_context`,
    torch operations) is not repeated: a tape serves one token count, row count and logits count.
    Hold the results that you want to read after a replay; the memory of all others is shared.
    """

    name = "native"

    def __init__(self, threads: int = 0, isa: str | None = None) -> None:
        native = load_native()
        chosen = isa or os.environ.get(ISA_VARIABLE) or "auto"
        if threads < 0:
            raise ConfigError(f"threads={threads} must be at least 0 (all that can compute)")
        threads = threads or default_threads()
        try:
            self._runtime = native.Runtime(threads, chosen)
        except ValueError as error:
            raise UnsupportedError(f"{error} (option isa or {ISA_VARIABLE})") from error
        except RuntimeError as error:  # the system's limit of tasks or of memory
            raise ConfigError(
                f"cannot start {threads} threads: {error}; choose fewer (option threads)"
            ) from error
        self._arena = Arena()
        self._region = Region()

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return self._runtime.isa

    @property
    def threads(self) -> int:
        return self._runtime.threads

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Run a pass and record it; the tape is ready when the block ends."""
        assert not self._runtime.recording, "recordings do not nest"
        tape = Tape(self._runtime)
        self._runtime.start_recording()
        try:
            yield tape
        finally:
            tape._calls = self._runtime.stop_recording()


def available() -> bool:
    """Whether this build has native kernels."""
    try:
        load_native()
    except UnsupportedError:
        return False
    return True


def isas() -> tuple[str, ...]:
    """Instruction sets that this build has and this processor runs, the slowest first."""
    return tuple(load_native().supported_isas())
