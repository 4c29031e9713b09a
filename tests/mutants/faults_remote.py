"""Faults of requests between machines that the tests must notice."""

from planting import PythonFault as Fault

CHANNEL = "pymoe/remote/channel.py"
CHECKPOINTS = "pymoe/remote/checkpoints.py"
JOURNAL = "pymoe/remote/journal.py"
REQUESTS = "pymoe/remote/requests.py"
SERVICE = "pymoe/remote/service.py"
HISTORIES = "tests/remote/test_journal.py"
ONCE = "tests/remote/test_exactly_once.py"
FAILURES = "tests/remote/test_failures.py"
SECURITY = "tests/remote/test_security.py"

FAULTS = [
    Fault(
        "every attempt has a key of its own",
        REQUESTS,
        "            request.ack = self.stub.numbers.ack()\n",
        "            request.seq = self.stub.numbers.new()\n",
        (ONCE, "-k", "connections_are_cut or key_of_the_one_before"),
    ),
    Fault(
        "a client acknowledges the request that it sends",
        REQUESTS,
        "return min(self._open, default=self._next)",
        "return min(self._open, default=self._next - 1) + 1",
        (HISTORIES, ONCE, "-k", "ack or histories or cut"),
    ),
    Fault(
        "a server forgets one key too many",
        JOURNAL,
        "if seq < ack]:",
        "if seq <= ack]:",
        (HISTORIES,),
    ),
    Fault(
        "a server takes a late attempt for a new request",
        JOURNAL,
        "if seq < known.low",
        "if seq < known.low - 1",
        (HISTORIES,),
    ),
    Fault(
        "keys are not saved",
        CHECKPOINTS,
        "checkpoint.keys = self._journal.keys(updates)",
        "checkpoint.keys = {}",
        (ONCE, "-k", "restarted_server"),
    ),
    Fault(
        "saved keys are newer than the parameters",
        JOURNAL,
        "if update <= updates))",
        "if update <= updates + 1))",
        (HISTORIES, ONCE, "-k", "snapshot or next_update"),
    ),
    Fault(
        "a request of several updates is saved with the last of them",
        SERVICE,
        "int(numbers.min())",
        "int(numbers.max())",
        ("tests/remote/test_bugs_remote.py", "-k", "several_updates"),
    ),
    Fault(
        "keys are listed before what the state holds has settled",
        CHECKPOINTS,
        "            await self._journal.settled()\n",
        "",
        (ONCE, "-k", "still_under_way"),
    ),
    Fault(
        "gradients that wait for others count as applied",
        "pymoe/runtime/gradients.py",
        "return self.updates + (1 if self.batches else 0)",
        "return self.updates",
        (ONCE, "-k", "next_update"),
    ),
    Fault(
        "a second attempt runs beside the first",
        JOURNAL,
        "running = known.running.get(seq)",
        "running = None",
        (HISTORIES,),
    ),
    Fault(
        "a request ends with the client that asked first",
        JOURNAL,
        "return await asyncio.shield(running.done)",
        "return await running.done",
        (HISTORIES,),
    ),
    Fault(
        "a checkpoint is written under its own name",
        CHECKPOINTS,
        "tensors, temporary",
        "tensors, path, metadata)\n        save_file(tensors, temporary",
        ("tests/remote/test_checkpoints.py", "-k", "could_not_be_written"),
    ),
    Fault(
        "a call has the time of the connection, and not that of its requests",
        REQUESTS,
        "(self._stub.channel.timeout if left is None else left)",
        "self._stub.channel.timeout",
        ("tests/remote/test_serving.py", "-k", "patience"),
    ),
    Fault(
        "frames of a message that was refused are taken for requests",
        SERVICE,
        "while not missing and not self.draining:",
        "while not self.draining:",
        ("tests/remote/test_streams.py", "-k", "room"),
    ),
    Fault(
        "a stream is tried with every request though the server has its most",
        CHANNEL,
        "self._refused = time.monotonic()\n",
        "pass\n",
        ("tests/remote/test_streams.py", "-k", "remembered"),
    ),
    Fault(
        "a write of a checkpoint that nobody waits for is overtaken",
        CHECKPOINTS,
        "        async with self._writing:  # writes wait here in the order in which their states were taken\n",
        "        if True:\n",
        ("tests/remote/test_checkpoints.py", "-k", "overtaken"),
    ),
    Fault(
        "a stream that has ended is used again",
        CHANNEL,
        "if stream.timer.reset(seconds) and stream.metadata is metadata and stream.open():",
        "if stream.timer.reset(seconds) and stream.metadata is metadata:",
        ("tests/remote/test_streams.py", "-k", "used_again"),
    ),
    Fault(
        "a stream is used whose idle time is over",
        CHANNEL,
        "if stream.timer.reset(seconds) and stream.metadata is metadata and stream.open():",
        "if (stream.timer.reset(seconds), stream.metadata is metadata and stream.open())[1]:",
        ("tests/remote/test_streams.py", "-k", "idle_time_is_over"),
    ),
    Fault(
        "a request that was given up stays in the line for room",
        "pymoe/runtime/room.py",
        "return self._waiting.pop(place, None) is not None",
        "return place in self._waiting",
        ("tests/runtime/test_room.py", "-k", "those_that_left"),
    ),
    Fault(
        "a function that blocks holds up the timers behind it",
        "pymoe/runtime/timers.py",
        "        if _due:\n            with suppress",
        "        if not _due:\n            with suppress",
        ("tests/runtime/test_timers.py", "-k", "set_before_it"),
    ),
    Fault(
        "the token is looked at after the message",
        SERVICE,
        "return grpc.stream_unary_rpc_method_handler(functools.partial(self._refuse, problem))",
        "return self._methods.get(details.method)",
        (SECURITY, "-k", "token"),
    ),
    Fault(
        "messages are decompressed",
        "pymoe/remote/server.py",
        '    ("grpc.compression_enabled_algorithms_bitset", 1),\n',
        "",
        (SECURITY, "-k", "compressed"),
    ),
    Fault(
        "an update that broke off is tried again",
        SERVICE,
        "in_part = broken or name in",
        "in_part = name in",
        (FAILURES, "-k", "broke_off"),
    ),
    Fault(
        "a dead server is asked again and again",
        CHANNEL,
        "            self._set_reachable(False)\n            self.watch()",
        "            self.watch()",
        ("tests/remote/test_mixtures.py", FAILURES, "-k", "death_in_a_step or gone_and_back"),
    ),
]
