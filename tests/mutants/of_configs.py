"""Faults in `configs`: settings that cannot work, or let strangers in, and are taken all the same."""

from __future__ import annotations

from mutant import Mutant

SETTINGS = "configs/settings.py"
HTTP = "configs/http_section.py"
TESTS = "tests/configs/"

MUTANTS = (
    Mutant(
        "quota-not-counted",
        "configs/machine/cores.py",
        "min([allowed, *(math.ceil(quota) for quota in _quotas())])",
        "allowed",
        (TESTS + "test_cores.py::test_a_quota_counts_where_it_is_less",),
        "In a container with a quota of 8 cores Ray is told the machine's 96.",
    ),
    Mutant(
        "quotas-beyond-the-budget",
        SETTINGS,
        "            if sum(quotas.values()) > budget:\n",
        "            if sum(quotas.values()) > 2**62:\n",
        (TESTS + "test_tenant_settings.py",),
        "Tenants are promised more of a tier than there is.",
    ),
    Mutant(
        "lease-shorter-than-a-load",
        SETTINGS,
        "if kv.lease_s < kv.load_deadline_s:",
        "if kv.lease_s < 0:",
        (TESTS + "test_settings.py",),
        "A segment is evicted before its load may end.",
    ),
    Mutant(
        "tier-beyond-the-memory",
        SETTINGS,
        "            if tier > limit:\n",
        "            if tier > 2**62:\n",
        (TESTS + "test_settings.py",),
        "The server starts, and the kernel ends it when the tier fills up.",
    ),
    Mutant(
        "tenant-without-a-key",
        SETTINGS,
        "            if tenant not in known:\n",
        "            if tenant is None:\n",
        (TESTS + "test_tenant_settings.py",),
        "A quota with a spelling mistake holds for no tenant.",
    ),
    Mutant(
        "every-web-page-without-keys",
        HTTP,
        'if "*" in self.cors_origins and not self.keys:',
        'if "*" in self.cors_origins and self.keys is None:',
        (TESTS + "test_settings.py",),
        "Any page in the operator's browser uses the server.",
    ),
    Mutant(
        "metrics-key-opens-more",
        HTTP,
        "if self.metrics_key is not None and key_digest(self.metrics_key) in self.keys:",
        "if self.metrics_key is not None and self.metrics_key in self.keys:",
        (TESTS + "secret/test_api_keys.py",),
        "The key that opens the metrics sends prompts as a tenant.",
    ),
    Mutant(
        "secrets-in-the-log-of-serve",
        "configs/secret/handed_on.py",
        "            hidden[name] = shown.pop(name)\n",
        "            hidden[name] = shown[name]\n",
        (TESTS + "secret/test_handed_on.py",),
        "Redis' password stands in Serve's arguments, which it logs.",
    ),
    Mutant(
        "secret-settings-quoted",
        "configs/errors.py",
        "        if secret is True:\n",
        "        if secret is None:\n",
        (TESTS + "secret/test_handed_on.py",),
        "A wrong setting's sentence shows a password.",
    ),
    Mutant(
        "unsafe-engine-argument",
        "configs/engine_arguments.py",
        "if value is not None and value != harmless:",
        "if value is not None and value == harmless:",
        (TESTS + "test_engine_arguments.py",),
        "An argument makes the engine store KV that is not exact.",
    ),
)
