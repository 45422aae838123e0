"""Environments of other libraries, as environments of this one."""
