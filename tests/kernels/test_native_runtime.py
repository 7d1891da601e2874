"""What every native kernel stands on: threads, instruction sets, result memory, recordings."""

import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from bifolio.errors import ConfigError, UnsupportedError
from bifolio.formats import WeightFormat
from bifolio.kernels.native import NativeOps
from bifolio.kernels.result_arena import Arena
from bifolio.quant import encode


def rows(seed: int, t: int = 64, h: int = 48) -> torch.Tensor:
    return torch.randn(t, h, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_tile_is_done_exactly_once_at_any_thread_count(threads: int) -> None:
    ops = NativeOps(threads)
    x = rows(0)
    for repeat in range(300):
        index = torch.randint(0, 64, (1 + repeat % 40,), dtype=torch.int32)
        assert torch.equal(ops.gather(x, index), x[index.long()])


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("t", [1, 8, 80])
def test_every_panel_is_done_exactly_once_at_any_thread_count(threads: int, t: int) -> None:
    weight = encode(rows(0, 1000, 64), WeightFormat.parse("int8:a8"))
    one, several = NativeOps(1), NativeOps(threads)
    packed, same = one.prepare(weight), several.prepare(weight)
    for repeat in range(40):
        x = rows(repeat, t, 64)  # a panel left out would show the product of other rows
        residual = rows(repeat + 1000, t, 1000)
        assert torch.equal(
            several.linear(x, same, residual_tn=residual),
            one.linear(x, packed, residual_tn=residual),
        )


def test_a_replay_computes_from_the_refilled_inputs_into_the_same_result() -> None:
    ops = NativeOps(2)
    x, index = rows(1), torch.tensor([3, 1], dtype=torch.int32)
    everything = torch.arange(64, dtype=torch.int32)
    with ops.record() as tape:
        y = ops.gather(ops.gather(x, everything), index)
    assert len(tape) == 2
    x.copy_(rows(2))
    index.copy_(torch.tensor([7, 0]))
    tape.replay()
    assert torch.equal(y, rows(2)[[7, 0]])


def test_calls_outside_a_recording_are_not_recorded() -> None:
    ops = NativeOps(1)
    x, index = rows(3), torch.zeros(1, dtype=torch.int32)
    with ops.record() as tape:
        ops.gather(x, index)
    ops.gather(x, index)
    assert len(tape) == 1


def test_a_second_thread_is_refused_while_the_first_computes() -> None:
    ops, index = NativeOps(2), torch.zeros(1, dtype=torch.int32)
    done, sink = (torch.zeros(1, dtype=torch.int64) for _ in range(2))

    def compute() -> None:
        while not done.item():
            with suppress(RuntimeError):  # it may be the second one itself
                ops._runtime.peak_probe(
                    product=0, repeats=100_000, operations=done.data_ptr(), sink=sink.data_ptr()
                )

    first, refusals = threading.Thread(target=compute), []
    first.start()
    while first.is_alive():
        try:
            ops.gather(rows(0), index)
        except RuntimeError as error:
            refusals.append(str(error))
            time.sleep(0.01)
    assert refusals
    assert "second thread" in refusals[0]
    assert torch.equal(ops.gather(rows(0), index), rows(0)[:1])


def test_an_unknown_instruction_set_is_refused_with_the_choices() -> None:
    with pytest.raises(UnsupportedError, match=r"'sse9'.*portable"):
        NativeOps(1, isa="sse9")


def test_a_number_of_threads_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads=-1"):
        NativeOps(-1)


def test_threads_that_the_system_refuses_are_an_error_and_not_the_end_of_the_process() -> None:
    """Room for some twenty stacks, so that the last of the threads cannot start."""
    program = (
        "import resource, torch\n"
        "from bifolio.errors import ConfigError\n"
        "from bifolio.kernels.native import NativeOps\n"
        "NativeOps(2)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "room = used + (200 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "try:\n"
        "    NativeOps(1000)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot start 1000 threads" in done.stdout, (done.returncode, done.stderr)


def test_the_environment_variable_forces_the_instruction_set() -> None:
    program = "from bifolio.kernels.native import NativeOps; print(NativeOps(1).isa)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"BIFOLIO_ISA": "portable", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "portable"


def test_idle_workers_use_no_processor_time() -> None:
    ops = NativeOps(3)
    ops.gather(rows(4), torch.zeros(9, dtype=torch.int32))

    def used() -> float:
        before = time.process_time()
        time.sleep(0.2)
        return time.process_time() - before

    start = time.process_time()
    while used() >= 0.02:  # they look out for work a little longer where they have to share a core
        assert time.process_time() - start < 0.5, "the workers do not sleep"


def test_arena_memory_is_lent_again_only_after_the_last_view_is_gone() -> None:
    arena = Arena()
    first = arena.take(4, 100)
    address, view = first.data_ptr(), first[1:, :50]
    del first
    gc.collect()
    assert arena.take(4, 100).data_ptr() != address
    del view
    gc.collect()
    again = [arena.take(4, 100) for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in again}


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000, 12345, 1 << 20])
def test_arena_blocks_are_aligned_and_waste_at_most_an_eighth(count: int) -> None:
    arena = Arena()
    tensor = arena.take(count)
    assert tensor.shape == (count,)
    assert count == 0 or tensor.data_ptr() % 64 == 0
    assert 4 * count <= arena.nbytes <= max(1024, 4 * count * 9 / 8)


def test_arena_results_of_all_lengths_leave_a_few_times_the_largest_behind() -> None:
    arena = Arena()
    largest = 64 << 20
    for tenth in range(1, 101):
        arena.take(largest * tenth // 100, dtype=torch.uint8)
    assert largest <= arena.nbytes <= 4 * largest
