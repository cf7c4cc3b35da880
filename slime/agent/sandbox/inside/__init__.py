"""The programs between the driver and a sandbox's commands: the monitor outside, the init inside, one worker a command.

They are started as `python -I -S` with this package alone on the search path, and the init goes on running after its
root folder has been exchanged: so they import the standard library only, each other relatively, and nothing after that.
A start is mostly imports, so they do without `typing`, `dataclasses` and `shutil`.
"""
