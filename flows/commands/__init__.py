"""Commands of the CLI, one file each, named like the command, with a `register(app)`.

A command reads its arguments, calls one function of a lower room and prints. Nothing heavy is
imported at the top of these files. Files with a leading underscore are parts that commands share.
"""
