"""The process inside which a model's code runs: one JSON line in, one JSON line out, variables kept between them.

A program of its own, of the standard library alone, that serves one attempt and ends with it. It is no boundary by
itself; that is the sandbox around it. Its own limits are for code that means no harm: an alarm in every call after
which the variables are still there, memory, processor time, and a bound on what is printed.

Whatever the code writes to its standard output goes to the answer: through `print`, or from a child through the
descriptor. The lines of the protocol go over descriptors that the code is not told of; code that finds them can spoil
its own attempt only, since every answer repeats the nonce of its request. When the other side hangs up, the process
ends, in the middle of a call too.
"""

import ast
import json
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import traceback

FILE = "<code>"
GRACE_CPU_S = 10


class TooMuchOutput(BaseException):
    """More was printed than anybody will read."""


class OutOfTime(BaseException):
    """The alarm of a call went off."""


class Output:
    """What is printed, up to a bound; looks like a text file."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, limit):
        self.limit = limit
        self.pieces = []
        self.size = 0

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        room = self.limit - self.size
        self.pieces.append(text[: max(0, room)])
        self.size += len(text)
        if self.size > self.limit:
            raise TooMuchOutput
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        pass

    def isatty(self):
        return False

    def fileno(self):
        return 1

    def writable(self):
        return True

    def text(self):
        return "".join(self.pieces)


class Worker:
    """The variables of one attempt and the code that changes them."""

    def __init__(self):
        self.variables = {"__name__": "__main__", "__builtins__": __builtins__}
        self.spilled = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the process lasts)
        os.dup2(self.spilled.fileno(), 1)
        os.dup2(self.spilled.fileno(), 2)

    def answer(self, request):
        """Run one piece of code; what it printed, and how it ended."""
        output = Output(request["max_output"])
        sys.stdout = sys.stderr = output
        limit_cpu(request["timeout_s"])
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            outcome, error = self.run(request["code"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout = sys.stderr = Output(0x7FFFFFFF)
        text = output.text()
        spilled = self.take_spilled(request["max_output"])
        if len(spilled) + len(text) > request["max_output"]:
            outcome, error = "too_much_output", error or ""
        return {
            "nonce": request["nonce"],
            "outcome": outcome,
            "output": (text + spilled)[: request["max_output"]],
            "error": error,
        }

    def run(self, code):
        try:
            self.execute(code)
        except OutOfTime:
            return "timeout", ""
        except TooMuchOutput:
            return "too_much_output", ""
        except SystemExit as end:
            return ("ok", "") if end.code in (None, 0) else ("error", f"SystemExit: {end.code}")
        except MemoryError:
            return "error", "MemoryError: the memory of the interpreter is used up"
        except BaseException as error:  # noqa: BLE001 (whatever the model's code raises is its result)
            return "error", described(error)
        return "ok", ""

    def execute(self, code):
        tree = ast.parse(code, FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec"), self.variables)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), self.variables)
            if value is not None:
                self.variables["_"] = value
                print(repr(value))

    def take_spilled(self, limit):
        self.spilled.seek(0)
        text = self.spilled.read(4 * limit + 4).decode("utf-8", "replace")
        self.spilled.seek(0)
        self.spilled.truncate()
        return text


def described(error):
    """The error as Python prints it, with the lines of the model's code and nobody else's."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    lines = [f"line {frame.lineno}, in {frame.name}" for frame in frames[-5:]]
    return "\n".join([*lines, "".join(traceback.format_exception_only(error)).strip()])


def limit_cpu(timeout_s):
    """The kernel ends what no alarm interrupts: a single long operation in C."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + timeout_s) + GRACE_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or seconds <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def limit_memory(megabytes):
    wanted = megabytes << 20
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        _, hard = resource.getrlimit(kind)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(kind, (limit, hard))
        except (ValueError, OSError):  # macOS refuses a limit on address space
            continue


def requests(source):
    """The lines that come in. They are read by a thread, so that a hang-up is seen while code runs."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read():
        held = b""
        while piece := os.read(source, 1 << 16):
            held += piece
            *whole, held = held.split(b"\n")
            for line in whole:
                lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def out_of_time(signum, frame):
    raise OutOfTime


def send(sink, message):
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(sink, line) :]


def main():
    memory_mb, *packages = sys.argv[1:]
    sys.path.extend(packages)
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, out_of_time)
    worker = Worker()
    limit_memory(int(memory_mb))
    send(sink, {"ready": True})
    for request in requests(source):
        send(sink, worker.answer(request))


if __name__ == "__main__":
    main()
