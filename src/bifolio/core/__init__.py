"""Decides which tokens are computed when, and which page holds them, without any tensor."""

from bifolio.core.cache import CacheManager
from bifolio.core.holds import HoldBook
from bifolio.core.limits import Limits
from bifolio.core.pages import PagePool
from bifolio.core.radix import RadixTree
from bifolio.core.scheduler import Scheduler
from bifolio.core.stats import SchedulerStats
from bifolio.core.step import LogitsFault, PageFault, PageStamp, RowResult, Step, StepRow

__all__ = [
    "CacheManager",
    "HoldBook",
    "Limits",
    "LogitsFault",
    "PageFault",
    "PagePool",
    "PageStamp",
    "RadixTree",
    "RowResult",
    "Scheduler",
    "SchedulerStats",
    "Step",
    "StepRow",
]
