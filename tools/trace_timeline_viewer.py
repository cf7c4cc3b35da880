"""Not here: the timeline of a dump."""

from common import refuse

if __name__ == "__main__":
    refuse(
        "there is no timeline of dumps in this version: slime samples RUN lists the samples of a run, also while it "
        "goes on, and perf/* in its metrics has the times"
    )
