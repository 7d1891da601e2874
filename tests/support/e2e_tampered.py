"""A factory for the engine process: the real engine with a fault in the victim's pages."""

from bifolio.engine.engine import Engine
from support.faults import CacheFault, tamper_with


def create(config, progress):
    return Engine(config, progress, tamper_with(CacheFault.SWAPPED, after=3))
