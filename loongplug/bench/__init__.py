"""Measurements that a user can repeat: ``loongplug bench``.

Each file measures one thing, prints a table and can write JSON. They stand above training, which
they run as it is; nothing else imports them.
"""
