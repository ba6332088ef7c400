"""The dispatcher: claims due events, runs their handlers, settles the results.

Read `jobs` (a job and its outcome), then `lanes` and `intake` (what is claimed), `running` and `slots` (how a handler
is run), `settling` (how results are stored), `heart` (leases), `suspects` and `children` (jobs that may kill their
worker), `care` (watchdog and housekeeping), and `core`, which ties them together.
"""

from pulse_outbox.dispatcher.core import Dispatcher
from pulse_outbox.dispatcher.settings import DispatcherSettings

__all__ = ["Dispatcher", "DispatcherSettings"]
