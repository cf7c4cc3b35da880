"""The programs between the driver and a sandbox's commands: a monitor outside, an init inside, one worker per command.

They start as `python -I -S` with only this package on the search path, and the init keeps running after its root folder
has been replaced. So they import only the standard library and, relatively, each other, and import nothing later.
Imports take most of a start, so `typing`, `dataclasses` and `shutil` are not imported.
"""
