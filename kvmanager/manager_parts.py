"""What a manager is made of, wired together. It has no behaviour: `kvmanager.manager.KVManager` has. One thread."""

from collections.abc import Callable, Mapping, Sequence

from kvmanager.config import ManagerConfig
from kvmanager.eviction.pins import Pins
from kvmanager.eviction.policies import EvictionPolicy, PolicySetting, find_policy, make_policy
from kvmanager.eviction.quotas import Quotas
from kvmanager.eviction.reuse_model import ReuseModel
from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.deltas import DeltaLog
from kvmanager.index.demotion_queue import DemotionQueue
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import REDIS, Location
from kvmanager.index.snapshots import Snapshots
from kvmanager.index.stores import Store
from kvmanager.index.trie import PrefixTrie
from kvmanager.moves.chain_search import ChainSearch
from kvmanager.moves.demotions import Demotions
from kvmanager.moves.due_evictions import DueEvictions
from kvmanager.moves.leases import Leases, Numbers
from kvmanager.moves.offloads import Offloads
from kvmanager.moves.plan_draft import PlanExtension
from kvmanager.moves.planner import PlanBooks, Planner, PlanShape
from kvmanager.moves.prompt_orders import PromptOrders
from kvmanager.moves.renewals import Renewals
from kvmanager.moves.saves import Saves
from kvmanager.segments.keys import SegmentKey
from kvmanager.views.tree import Views


class ManagerParts:
    """The parts. Raises ValueError for an eviction policy that is not known or cannot be made."""

    def __init__(
        self,
        config: ManagerConfig,
        epoch: int,
        policy: Callable[[PolicySetting], EvictionPolicy] | None = None,
        extensions: Sequence[PlanExtension] = (),
    ) -> None:
        """`epoch`: where the numbers of promises begin. `policy`: makes the eviction policies in place of the one that
        the configuration names; none learns. `extensions`: of plans, in the order in which they are asked."""
        learns = policy is None and find_policy(config.eviction_policy).learns
        self.blocks_per_segment = config.blocks_per_segment
        numbers = Numbers(epoch)
        self.counters = Counters()
        self.clock = HotnessClock(config.half_life_requests)
        self.log = DeltaLog(config.max_deltas)
        self.reuse = ReuseModel() if learns else None
        self.trie = PrefixTrie(config.max_ghosts, None if self.reuse is None else self.reuse.forgot)
        self.queue = DemotionQueue(self.clock, self.counters, config.redis_min_uses)

        def policy_for(budget_bytes: Callable[[], int]) -> EvictionPolicy:
            setting = PolicySetting(self.clock, budget_bytes, config.policy_seed, self.reuse)
            return make_policy(config.eviction_policy, setting) if policy is None else policy(setting)

        policy_for(lambda: 0)  # what is no policy is refused now, not when the first tier comes
        self.catalog = Catalog(self.trie, self.clock, self.log, policy_for, self.queue, self.reuse)
        self.renewals = Renewals(self.trie, self.catalog.stores, self.counters, config.redis_renew_s)
        self.forms = RedisForms(self.trie, self.catalog.stores)
        self.leases = Leases(self.catalog, self.counters, config.lease_s, numbers)
        books = PlanBooks(self.counters, self.renewals, self.leases)
        self.search = ChainSearch(self.catalog, config.blocks_per_segment)
        shape = PlanShape(config.block_tokens, epoch)
        self.planner = Planner(self.catalog, self.search, books, shape, extensions)
        self.saves = Saves(self.catalog, self.counters, config.blocks_per_segment, config.save_s, numbers)
        self.demotions = Demotions(
            self.catalog, self.queue, self.counters, config.cpu_high_water, config.save_s, numbers
        )
        self.pins = Pins(self.catalog, config.pin_budget_bytes, config.longest_pin_s, config.tenant_pin_bytes)
        self.quotas = Quotas(self.catalog, self.counters)
        self.devices = DeviceIndex(self.log)
        self.snapshots = Snapshots(self.catalog, self.devices)
        self.offloads = Offloads(self.catalog, self.search, self.devices, self.clock, config.blocks_per_segment)
        self.due = DueEvictions(self.counters)
        self.orders = PromptOrders(self.catalog.stores, self.search, self.demotions, self.due)
        self.views = Views(self.trie, self.devices, self.clock, config.block_tokens)


class RedisForms:
    """In which form Redis has segments: dense unless said otherwise (`kvmanager.segments.forms`).

    A caller that commits or adopts segments at Redis notes the form of each before anything is planned. One thread.
    """

    def __init__(self, trie: PrefixTrie, stores: Mapping[Location, Store]) -> None:
        self._trie = trie
        self._stores = stores

    def note(self, forms: Mapping[SegmentKey, bytes]) -> None:
        """Note the forms of segments that Redis has; one that is not known there is no error. O(forms)."""
        redis = self._stores.get(REDIS)
        for key, form in forms.items() if redis is not None else ():
            node = self._trie.nodes.get(key)
            copy = None if node is None or redis is None else node.copy_at(redis)
            if copy is not None:
                copy.form = form
