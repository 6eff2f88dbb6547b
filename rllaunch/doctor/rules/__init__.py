"""The rules that ship with rllaunch: one small file a family, each with its cases as data."""
