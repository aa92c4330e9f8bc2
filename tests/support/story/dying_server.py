"""`tmc serve`, killed by itself when it is about to hand over a message whose key begins with `die-`: after the submit's
commit, before the publish."""

from __future__ import annotations

import os
import signal

from tmc_server.delivery.rabbitmq import RabbitOutlet

deliver = RabbitOutlet.deliver


def die(self, copies):
    if any(copy.key.startswith("die-") for copy in copies):
        os.kill(os.getpid(), signal.SIGKILL)
    deliver(self, copies)


RabbitOutlet.deliver = die

if __name__ == "__main__":
    from tmc_cli import main

    main()
