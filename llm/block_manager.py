"""The KV cache's blocks: who holds which, how often, and where a known prefix can be found again.

A block holds the keys and values of `block_size` consecutive tokens. It is in exactly one state:

    free    nobody holds it, nothing in it can be found
    used    one or more sequences hold it (reference count)
    cached  nobody holds it, but its content can be found by a prefix; the least recently used one is reused first

    block table of a sequence of 40 tokens, block_size 16:

      tokens   0 .. 15    16 .. 31    32 .. 39
      table  [    7     ,     2     ,    11    ]     7 and 2 are full: found again by their tokens, 11 is not

A full block is indexed by (identity of the content before it, its own tokens). The dictionary compares the tokens
themselves, so a hit is never wrong. Blocks are numbered from 1: block 0 belongs to the worker's padding.
"""

from collections import OrderedDict, deque

from llm.sequence import Sequence

_ROOT = 0  # the identity of "nothing before"
_Key = tuple[int, tuple[int, ...]]


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._free = deque(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[_Key, tuple[int, int]] = {}  # key -> (content's identity, block)
        self._keys: dict[int, _Key] = {}  # block -> key, for indexed blocks
        self._chains: dict[int, list[int]] = {}  # seq_id -> identities of its full blocks, as far as known
        self._last_identity = _ROOT

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Whether all known tokens of a sequence without blocks fit, leaving `reserve` blocks available."""
        found = self._find(sequence)
        taken = self.blocks_for(len(sequence.token_ids)) - len(found)
        taken += sum(1 for _, block in found if self._references[block] == 0)
        return taken + reserve <= self.num_available

    def allocate(self, sequence: Sequence) -> None:
        """Gives a sequence blocks for all its known tokens; sets its block table and what is computed already.

        The caller has asked `can_allocate`. The last known token is never taken from the cache: its logits are wanted.
        """
        found = self._find(sequence)
        for _, block in found:
            self._hold(block)
        sequence.block_table = [block for _, block in found]
        sequence.num_computed_tokens = len(found) * self.block_size
        self._chains[sequence.seq_id] = [identity for identity, _ in found]
        self.append(sequence)

    def can_append(self, sequence: Sequence) -> bool:
        return self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table) <= self.num_available

    def append(self, sequence: Sequence) -> tuple[int, ...]:
        """Grows the block table to hold all known tokens; returns the new blocks. The caller has asked `can_append`."""
        missing = self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
        new = tuple(self._take() for _ in range(missing))
        sequence.block_table.extend(new)
        return new

    def index(self, sequence: Sequence) -> None:
        """Makes the blocks that a step has filled findable. Costs nothing where no block was filled."""
        chain = self._chains[sequence.seq_id]
        size = self.block_size
        for i in range(len(chain), sequence.num_computed_tokens // size):
            key = (chain[-1] if chain else _ROOT, tuple(sequence.token_ids[i * size : (i + 1) * size]))
            known = self._index.get(key)
            if known is None:
                self._last_identity += 1
                block = sequence.block_table[i]
                known = (self._last_identity, block)
                self._index[key] = known
                self._keys[block] = key
            chain.append(known[0])

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back. Its last block is reused before its first, which others may share."""
        for block in reversed(sequence.block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        self._chains.pop(sequence.seq_id, None)

    def forget_contents(self) -> None:
        """The cache's memory is gone (the worker died): nothing can be found any more. Nobody may hold a block."""
        self._index.clear()
        self._keys.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Raises AssertionError unless free + used + cached = all and every index entry points to itself."""
        used = {block for block in range(1, self.num_blocks + 1) if self._references[block] > 0}
        free, cached = set(self._free), set(self._cached)
        whole = len(free) == len(self._free) and used | free | cached == set(range(1, self.num_blocks + 1))
        if not whole or len(used) + len(free) + len(cached) != self.num_blocks or min(self._references) < 0:
            raise AssertionError(f"blocks don't add up: {len(free)} free, {len(used)} used, {len(cached)} cached")
        if any(self._index[key][1] != block for block, key in self._keys.items()) or len(self._index) != len(self._keys):
            raise AssertionError("the prefix index and the blocks disagree")
        if free & self._keys.keys() or cached - self._keys.keys():
            raise AssertionError("a free block is indexed, or a cached one is not")

    def _find(self, sequence: Sequence) -> list[tuple[int, int]]:
        """(identity, block) of the longest known prefix, in full blocks, short of the last token."""
        found: list[tuple[int, int]] = []
        if sequence.params.prompt_logprobs is not None:
            return found  # every prompt token's logits are wanted, so every one is computed
        identity, size, tokens = _ROOT, self.block_size, sequence.token_ids
        for i in range((len(tokens) - 1) // size):
            known = self._index.get((identity, tuple(tokens[i * size : (i + 1) * size])))
            if known is None:
                break
            found.append(known)
            identity = known[0]
        return found

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._index[self._keys.pop(block)]
        self._references[block] = 1
        return block
