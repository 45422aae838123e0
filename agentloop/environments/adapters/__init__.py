"""Adapters that make environments of other libraries into environments of this one."""
