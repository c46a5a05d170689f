"""agent_rl: a gym and trainer for multi-turn, tool-using language-model agents.

What it exports is listed in __init__.pyi, and imported when it is first used.
"""

import logging

import lazy_loader

logging.getLogger(__name__).addHandler(logging.NullHandler())
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
