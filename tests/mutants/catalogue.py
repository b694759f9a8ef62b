"""All mutants. Those whose tests take long come first, so that the last ones to end are short."""

from __future__ import annotations

from of_app import MUTANTS as APP
from of_configs import MUTANTS as CONFIGS
from of_deployments import MUTANTS as DEPLOYMENTS
from of_dialects import MUTANTS as DIALECTS
from of_engine import MUTANTS as ENGINE
from of_kernels import MUTANTS as KERNELS
from of_kvmanager import MUTANTS as KVMANAGER
from of_segments import MUTANTS as SEGMENTS
from of_start import MUTANTS as START

MUTANTS = (*ENGINE, *APP, *START, *DIALECTS, *DEPLOYMENTS, *KERNELS, *CONFIGS, *KVMANAGER, *SEGMENTS)
