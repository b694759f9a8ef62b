"""Choices of what a plan loads, made by functions of a test."""

from kvmanager.moves.plan_draft import AllStored


class Chosen(AllStored):
    """As `AllStored`, but for what a test's functions say."""

    def __init__(self, choose=None, device_tokens=0):
        self.device_tokens = device_tokens
        self.choose = choose or self.choose
