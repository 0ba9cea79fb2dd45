"""Imported first in the forkserver: a forkserver that is still importing doesn't see that its parent has died."""

from llm.worker_entry import die_with_parent

die_with_parent()
