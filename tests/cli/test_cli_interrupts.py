import os
import signal

import pytest

from bifolio.cli.api_client import noticed_interrupts


class LosesExceptions:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the signal's handler runs between two of these
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finaliser_swallowed_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noticed_interrupts() as check:
        check()
        victim = LosesExceptions()
        del victim  # drops the KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_raises_at_once_as_ever() -> None:
    with pytest.raises(KeyboardInterrupt), noticed_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
