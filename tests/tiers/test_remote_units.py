"""The pure parts of the remote tier: what a URL says, what a seal is worth, when a store is paused, what it takes."""

import json

import pytest
from disk_parts import BLOCK, address, content, image

from onekv.config import Settings
from onekv.errors import SettingError
from onekv.sim.faults import Faults, SimClock
from onekv.sim.store import SimStore
from onekv.tiers.base import Entry, Target
from onekv.tiers.remote import opening
from onekv.tiers.remote.common import Setup
from onekv.tiers.remote.health import FIRST_PAUSE, LONGEST_PAUSE, Breaker, Pace
from onekv.tiers.remote.seal import DAMAGED, FORGED, SEAL, Sealer
from onekv.tiers.remote.tier import RemoteTier
from onekv.tiers.remote.url import parse
from onekv.tiers.remote.writes import OPERATIONS, Rate

# URLs


def test_what_urls_mean():
    place = parse("valkey://me:a%20word@cache.local:7000/2?ttl=7d&timeout=500ms")
    assert (place.kind, place.host, place.port, place.path, place.user) == ("valkey", "cache.local", 7000, "2", "me")
    assert (place.password, place.tls, place.ttl, place.timeout) == ("a word", False, 7 * 86400, 0.5)
    assert "word" not in place.shown and "word" not in repr(place)
    assert parse("rediss://cache").tls and parse("valkeys://cache").tls and not parse("redis://cache").tls
    assert parse("redis://cache", "pw").password == "pw" and parse("redis://:own@cache", "pw").password == "own"
    assert parse("valkey://cache?cluster=on").cluster
    place = parse("s3://bucket/some/where")
    assert (place.kind, place.host, place.path) == ("s3", "bucket", "some/where")
    assert parse("file:///shared/a%20folder").path == "/shared/a folder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memcached://cache", "begins with 'memcached'; write it like valkey://"),
        ("/shared/folder", "begins with '/shared/folder'"),
        ("valkey:///0", "without a host"),
        ("valkey://cache/db", "the number of a database"),
        ("valkey://cache:99999", "is not a URL"),
        ("valkey://cache?ttl=week", "ttl='week'; write a time like 7d"),
        ("valkey://cache?ttl=0s", "ttl='0s'"),
        ("valkey://cache/1?cluster=on", "only has database 0"),
        ("valkey://cache?cluster=maybe", "cluster is 'maybe'; it must be on or off"),
        ("s3://bucket?ttl=7d", "lifecycle rules"),
        ("s3://bucket?cluster=on", "takes timeout"),
        ("file://folder", "file:///shared/folder"),
    ],
)
def test_what_urls_may_not_say(text, message):
    with pytest.raises(SettingError) as error:
        parse(text, "hush")
    assert message in str(error.value) and "hush" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "valkey://me:hush#hush@cache",
        "valkey://me:hush/hush@cache:7000/0",
        "valkey://me:123/hush@cache",
        "valkey://me:123?hush@cache",
        "redis://:123#hush@cache",
        "valkey://me:hush\u2100@cache",
        "//me:hush@cache",
    ],
)
def test_no_part_of_a_password_that_was_not_escaped_is_shown(text):
    with pytest.raises(SettingError, match=r"%23|begins with 'cache'") as error:
        parse(text)
    assert "hush" not in str(error.value) and "123" not in str(error.value)


def test_a_store_elsewhere_needs_a_secret(tmp_path):
    def secret(url: str, given: str | None = None) -> str | None:
        checked = opening.check(Settings(remote_tier=url, tier_secret=given))
        assert checked is not None
        return checked[1]

    for url in ("valkey://127.0.0.1", "redis://[::1]:7000", "valkey://localhost", "file:///shared"):
        assert secret(url) is None
    for url in ("valkey://10.0.0.1", "rediss://cache.local", "s3://bucket"):
        with pytest.raises(SettingError, match="set the same --tier-secret on all servers, or --tier-secret none"):
            secret(url)
        assert secret(url, "none") is None
        assert secret(url, "sixteen letters!") == "sixteen letters!"
    with pytest.raises(SettingError, match="has 5 characters; it must have at least 16"):
        secret("s3://bucket", "short")
    (tmp_path / "secret").write_text("from a file, and long\n")
    assert secret("s3://bucket", f"@{tmp_path}/secret") == "from a file, and long"
    with pytest.raises(SettingError, match="cannot be read"):
        secret("s3://bucket", f"@{tmp_path}/nothing")
    assert "sixteen" not in repr(Settings(remote_tier="s3://bucket", tier_secret="sixteen letters!"))
    with pytest.raises(SettingError, match="--prefix-cache is off, but --remote-tier is set"):
        Settings(remote_tier="s3://bucket", prefix_cache=False)


# Seals


def sealed(sealer: Sealer, number: int = 1) -> tuple[str, bytearray]:
    kind, where = image(4096), address(number)
    value = bytearray(kind.size + SEAL)
    value[: kind.header_size] = kind.header(sealer.model, where)
    value[kind.header_size : kind.size] = content(where.key, 0, kind.data_size)[: kind.data_size]
    name = sealer.name(where.key, 0)
    sealer.seal(name, memoryview(value))
    return name, value


def test_a_seal_tells_damage_forgery_and_content_of_another_place():
    kind, where = image(4096), address(1)
    sealer, other = Sealer("m" * 32, "a secret", BLOCK), Sealer("m" * 32, "another", BLOCK)
    name, value = sealed(sealer)
    assert sealer.problem(name, memoryview(value), kind, where) is None
    for position in (0, 40, kind.header_size + 1, kind.size + 3, kind.size + 10):
        damaged = bytearray(value)
        damaged[position] ^= 1
        assert sealer.problem(name, memoryview(damaged), kind, where) == DAMAGED
    assert "size" in str(sealer.problem(name, memoryview(value)[:-1], kind, where))
    # By somebody who knows all but the secret.
    forged = bytearray(value)
    forged[kind.header_size] ^= 1
    other.seal(name, memoryview(forged))
    assert sealer.problem(name, memoryview(forged), kind, where) == FORGED
    # A right value under another name.
    elsewhere, right = sealed(sealer, 2)
    assert sealer.problem(elsewhere, memoryview(right), kind, address(2)) is None
    assert sealer.problem(name, memoryview(right), kind, where) == FORGED
    assert sealer.problem(elsewhere, memoryview(right), kind, where) == "it is a different block"
    # Who has another secret does not even look at these names.
    assert sealer.name(where.key, 0) != other.name(where.key, 0)


def test_the_first_bytes_of_a_value_name_its_address_and_nothing_else_does():
    kind, where = image(4096), address(3)
    sealer = Sealer("m" * 32, None, BLOCK)
    _, value = sealed(sealer, 3)
    head = bytes(value[: sealer.head_size(kind)])
    assert sealer.address(head, kind) == where
    noise = [
        b"",
        b"}",
        b"\0" * 600,
        head[:100],
        head.replace(b'"start"', b'"begin"'),
        b"8" * 8 + json.dumps([]).encode(),
    ]
    noise += [
        head.replace(b'"parent"', b'"tokens"'),
        head[:24] + b"[" * 100000 + b"}",
        head.replace(b"m" * 32, b"n" * 32),
    ]
    assert [sealer.address(each, kind) for each in noise] == [None] * len(noise)


# Health


def test_a_breaker_pauses_for_longer_while_the_store_fails_again():
    breaker = Breaker()
    assert breaker.fail("refused", 100.0) and breaker.paused and breaker.until == 100.0 + FIRST_PAUSE
    assert not breaker.fail("refused", 101.0) and breaker.until == 101.0 + 2 * FIRST_PAUSE
    assert breaker.resume(110.0) == 10.0 and not breaker.paused and breaker.resume(111.0) is None
    assert breaker.fail("again", 112.0) and breaker.until == 112.0 + 4 * FIRST_PAUSE
    for second in range(20):
        breaker.fail("still", 120.0 + second)
    assert breaker.until == 139.0 + LONGEST_PAUSE and breaker.pauses == 2
    breaker.resume(200.0)
    assert breaker.fail("much later", 200.0 + LONGEST_PAUSE) and breaker.until == 200.0 + LONGEST_PAUSE + FIRST_PAUSE


def test_reading_is_worth_it_where_it_is_faster_than_computing():
    pace = Pace()
    assert pace.worth(10**9, 1)
    pace.computed(1000, 1.0)
    assert pace.worth(10**9, 1)
    pace.answered(0.01)
    pace.transferred(10**6, 5.0, 5.01)
    # 100 MB/s against 1,000 tokens/s.
    assert pace.worth(10**7, 1000) and not pace.worth(10**8, 1000) and not pace.worth(1, 10)
    # Two that end together had the link together.
    pace.transferred(10**6, 6.0, 6.02)
    pace.transferred(10**6, 6.0, 6.02)
    assert pace.byte is not None and pace.byte < 2e-8


def test_writes_keep_to_bytes_and_operations_per_second():
    rate = Rate(1000.0, operations=10)
    now, sent = 50.0, []
    for size in (500, 500, 1000, 1, 1):
        now += rate.wait(size, now)
        sent.append(round(now, 6))
    assert sent == [50.0, 50.5, 51.0, 52.0, 52.1]


# The tier, with its threads' steps made by hand


def test_each_removal_counts_as_an_operation():
    """A store may be full of wrong values, and is not flooded for that; nor is what waits to be put lost with one."""
    clock, store = SimClock(), SimStore(Faults(), SimClock())
    setup = Setup(
        store, "a store", Sealer("m" * 32, None, BLOCK), {0: image(4096)}, BLOCK, {0: None}, None, "all", clock, False
    )
    tier = RemoteTier(setup, 10**6, 10**6, 1e9)
    while tier.work():
        continue
    where = address(9)
    tier.touch([where.key])
    tier.drop([address(number).key for number in range(5)], wrong=True)
    assert tier.offer(where, 0, lambda out: None)
    store.values = {setup.sealer.name(address(number).key, 0): b"wrong" for number in range(5)}
    for left in (4, 3, 2, 1, 0):
        assert tier.work() and len(store.values) == left
    assert tier.work() and list(store.values) == [setup.sealer.name(where.key, 0)]
    # All of them together took as long as six may.
    assert tier._writes._rate.wait(0, clock.monotonic()) == pytest.approx(6 / OPERATIONS, abs=1e-4)
    tier.close()


def test_what_is_computed_before_the_store_would_have_answered_is_not_looked_up():
    clock, store = SimClock(), SimStore(Faults(), SimClock())

    def tier_of(timeout: float | None) -> RemoteTier:
        sealer = Sealer("m" * 32, None, BLOCK)
        setup = Setup(store, "a store", sealer, {0: image(4096)}, BLOCK, {0: None}, timeout, "all", clock, False)
        tier = RemoteTier(setup, 10**6, 10**6, 1e9)
        while tier.work():
            continue
        return tier

    keys = [address(number).key for number in range(100)]
    tier = tier_of(None)
    # Before anything was measured.
    assert tier.find(keys[:1]) is None
    while tier.work():
        continue
    assert tier.find(keys[:1]) == {} and tier.stats().not_worth == 0
    # A block takes a second, of which 5 % are less than an answer takes: twenty blocks are worth one.
    tier._common.pace.latency = 0.9
    tier.computed(BLOCK, 1.0)
    assert tier.find(keys[:17]) == {} and not tier.work() and tier.stats().not_worth == 1
    assert tier.find(keys[:19]) is None and tier.work()
    # What has just been answered is known without a look-up.
    tier._common.pace.latency = 0.9
    assert tier.find(keys[:17]) == {} and tier.stats().not_worth == 1
    # Whoever says how long a look-up may take wants it.
    tier.close()
    tier = tier_of(60.0)
    tier._common.pace.latency = 0.9
    tier.computed(BLOCK, 1.0)
    assert tier.find(keys[:1]) is None
    tier.close()


def test_what_is_expected_while_the_store_is_paused_comes_when_it_is_in_use_again():
    clock, store = SimClock(), SimStore(Faults(), SimClock())
    kinds = {0: image(4096)}
    setup = Setup(store, "a store", Sealer("m" * 32, None, BLOCK), kinds, BLOCK, {0: None}, None, "all", clock, False)
    tier = RemoteTier(setup, 10**6, 10**6, 1e9)
    where = address(1)
    tier.touch([where.key])
    assert tier.wants([where.key]) == [where.key]
    assert tier.offer(where, 0, lambda out: out.__setitem__(slice(None), content(where.key, 0, len(out))[: len(out)]))
    tier.flush()
    assert tier.find([where.key]) is None
    while tier.work():
        continue
    assert tier.find([where.key]) == {where.key: Entry(where, frozenset({0}))}
    with tier._common.lock:
        tier._common.fail("for a moment")
    tier.expect([(where.key, 0)])
    while tier.work():
        continue
    tier._common.resume()
    assert tier.ready([(where.key, 0)]) == []
    while tier.work():
        continue
    assert tier.ready([(where.key, 0)]) == [(where.key, 0)]
    read = bytearray(kinds[0].data_size)
    assert tier.read([Target(where.key, 0, read)]) == [True]
    assert read == content(where.key, 0, len(read))[: len(read)]
    # Written once, and not wanted again.
    assert tier.wants([where.key]) == [] and tier.stats().writes == 1
    tier.close()


def test_a_store_is_not_measured_with_a_value_that_is_too_short():
    """Which would make every store a slow one: it is put anew."""
    store = SimStore(Faults(), SimClock())
    sealer = Sealer("m" * 32, None, BLOCK)
    kinds = {0: image(4096)}
    for wrong in (b"", b"short"):
        store.values[sealer.probe] = wrong
        tier = RemoteTier(
            Setup(store, "a store", sealer, kinds, BLOCK, {0: None}, None, "all", SimClock(), False), 10**6, 10**6, 1e9
        )
        while tier.work():
            continue
        assert len(store.values[sealer.probe]) == 256 * 1024 and tier.stats().bandwidth == 0.0
        tier.close()
