"""The process that runs a model's code: one JSON request per line in, one JSON answer per line out.

A separate program that uses only the standard library. It serves one attempt, keeps variables between its requests, and
ends with it. The sandbox around it provides the isolation. The limits of the program itself are for harmless code: an
alarm per call, after which the variables persist, and limits on memory, CPU time and output.

Everything that the code writes to standard output is in the answer, whether it is printed or written by a child to the
file descriptor. The protocol uses other file descriptors, which are hidden from the code; code that finds them can only
break its own attempt, because every answer repeats the nonce of its request. The process exits when its input is
closed, also during a call.
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
    """The code printed more than the output limit."""


class OutOfTime(BaseException):
    """The alarm of a call fired."""


class CapturedOutput:
    """Collects printed text up to a limit, with the interface of a text file."""

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


class CodeRunner:
    """Runs the code of one attempt and keeps its variables."""

    def __init__(self):
        self.variables = {"__name__": "__main__", "__builtins__": __builtins__}
        self.spilled = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the process lasts)
        os.dup2(self.spilled.fileno(), 1)
        os.dup2(self.spilled.fileno(), 2)

    def answer(self, request):
        """Run one piece of code and return its outcome, output and error."""
        output = CapturedOutput(request["max_output"])
        sys.stdout = sys.stderr = output
        limit_cpu(request["timeout_s"])
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            outcome, error = self.run(request["code"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout = sys.stderr = CapturedOutput(0x7FFFFFFF)
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
        except BaseException as error:  # noqa: BLE001 (any exception of the model's code is its result)
            return "error", format_error(error)
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


def format_error(error):
    """Format an error as Python prints it, with the stack frames of the model's code only."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    lines = [f"line {frame.lineno}, in {frame.name}" for frame in frames[-5:]]
    return "\n".join([*lines, "".join(traceback.format_exception_only(error)).strip()])


def limit_cpu(timeout_s):
    """Set a CPU limit, with which the kernel kills code that no alarm interrupts: a single long operation in C."""
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
    """Yield the requests that arrive.

    A thread reads them, so that the process exits when its input is closed, even while code runs.
    """
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
    worker = CodeRunner()
    limit_memory(int(memory_mb))
    send(sink, {"ready": True})
    for request in requests(source):
        send(sink, worker.answer(request))


if __name__ == "__main__":
    main()
