"""Programs that `rllaunch doctor --gpu-test` runs, each in a process of its own: what a GPU does when asked.

Each ends with one line of JSON on stdout: `{"ok": true, "text": …}`, or `false` and what went wrong.
"""
