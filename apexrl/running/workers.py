"""Runs several actor processes on one host, behind one relay of the parameters."""

from apexrl.children import role_script
from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.config.flags import to_flags
from apexrl.lifecycle import Stop
from apexrl.net.keyring import load_keyring
from apexrl.net.parameter_channel import ParameterPublisher, relay
from apexrl.net.sockets import address
from apexrl.running.supervise import Supervisor

MAX_RESTARTS = 100
IDLE_SECONDS, STOP_LIMIT_SECONDS = 2.5, 50.0  # less than the launcher gives this process


def run_workers(command: ActorCommand, stop: Stop) -> None:
    """Runs `num_workers` actor processes until stopped, and restarts those that die.

    Raises: ConfigError when a worker cannot work, PeerError when it dies again and again, PeerTimeout when the replay
      or the learner is away for longer than its patience: they are not ours, so it is not started again.
    """
    publisher = ParameterPublisher("127.0.0.1", 0)
    upstream = address(command.wires.learner_host, command.wires.parameter_port)
    keyring = load_keyring(command.wires.keys, "actor")
    stop.thread(publisher.run, "publisher")
    stop.thread(lambda: relay(upstream, publisher, stop, keyring), "relay")
    workers = Supervisor(MAX_RESTARTS)
    names = [f"actor worker {index}" for index in range(command.acting.num_workers)]
    try:
        for index, name in enumerate(names):
            worker = WorkerCommand(**vars(command), worker_index=index, parameter_endpoint=publisher.endpoint)
            workers.start(name, [role_script("actor.py"), *to_flags(worker)], peers_come_back=False)
        while not stop.wait(0.2):
            workers.watch()
    finally:
        workers.stop(names, IDLE_SECONDS, STOP_LIMIT_SECONDS, repeats=names)
        publisher.close()
