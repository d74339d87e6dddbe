"""What can be asked about mlx-k3 and Kimi K3, and the one right answer to each.

Owns the facts. A fact's topics are other words for the same thing; its kind says in which patterns
of :mod:`.about` they stand: after "What is" (``WHAT``), "What does ... do" (``DOES``), "How do I"
(``HOW``), or "What is the" (``SIZE``). ``whole`` are questions of their own.
"""

from typing import NamedTuple

WHAT, DOES, HOW, SIZE = "what", "does", "how", "size"


class AboutFact(NamedTuple):
    """Topics, answer, and whole questions of one fact. The first topic names it."""

    kind: str
    topics: tuple[str, ...]
    answer: str
    whole: tuple[str, ...] = ()


def _fact(kind: str, topics: str, answer: str, *whole: str) -> AboutFact:
    return AboutFact(kind, tuple(topics.split("; ")), answer, whole)


_PROJECT = (
    _fact(
        WHAT,
        "mlx-k3; the mlx-k3 package; this program; the program mlx-k3",
        "mlx-k3 runs Kimi K3 and its relatives on your own machine with MLX.",
        "What does mlx-k3 do?", "What is mlx-k3 for?", "What can I do with mlx-k3?",
    ),
    _fact(
        WHAT,
        "MLX; the framework MLX; Apple's MLX",
        "MLX is Apple's array framework for machine learning.",
        "Which framework does mlx-k3 use?", "What is mlx-k3 built on?",
    ),
    _fact(
        WHAT,
        "Kimi K3; K3; the model Kimi K3; Moonshot's K3",
        "Kimi K3 is a large language model by Moonshot AI with 2.78 trillion parameters.",
        "Who made Kimi K3?", "Who made K3?", "Which company made Kimi K3?", "Who built Kimi K3?",
    ),
    _fact(
        WHAT,
        "Kimi Linear; the Kimi Linear model; Kimi-Linear-48B-A3B",
        "Kimi Linear is a smaller relative of Kimi K3 that mlx-k3 runs too.",
    ),
    _fact(
        SIZE,
        "license of mlx-k3; license of the code; license of this program; licence of mlx-k3",
        "The code of mlx-k3 and its bundled checkpoint are under Apache-2.0.",
        "Which license does mlx-k3 have?", "Is mlx-k3 open source?", "How is mlx-k3 licensed?",
    ),
    _fact(
        SIZE,
        "Python version for mlx-k3; Python version that mlx-k3 needs; required Python version",
        "mlx-k3 needs Python 3.11, 3.12 or 3.13.",
        "Which Python does mlx-k3 need?", "Which Python version do I need?",
        "Which versions of Python work with mlx-k3?",
    ),
    _fact(
        SIZE,
        "list of supported systems; operating system for mlx-k3; system that mlx-k3 needs",
        "mlx-k3 runs on macOS 14 or later with Apple silicon, and on Linux.",
        "Where does mlx-k3 run?", "Does mlx-k3 run on Linux?", "Does mlx-k3 run on a Mac?",
        "Which systems does mlx-k3 support?", "Which operating systems does mlx-k3 run on?",
    ),
    _fact(
        HOW,
        "install mlx-k3 on a Mac; install mlx-k3 on macOS; set up mlx-k3 on Apple silicon",
        "Run pip install mlx-k3.",
        "How do I install mlx-k3?", "How can I install mlx-k3?", "How do I set up mlx-k3?",
    ),
    _fact(
        HOW,
        "install mlx-k3 on Linux without a GPU; install mlx-k3 on a Linux CPU; "
        "set up mlx-k3 on Linux with a CPU only",
        'Run pip install "mlx-k3[cpu]" and apt install libopenblas0.',
    ),
    _fact(
        HOW,
        "install mlx-k3 with CUDA 13; install mlx-k3 for CUDA 13; set up mlx-k3 on CUDA 13",
        'Run pip install "mlx-k3[cuda13]".',
    ),
    _fact(
        HOW,
        "install mlx-k3 with CUDA 12; install mlx-k3 for CUDA 12; set up mlx-k3 on CUDA 12",
        'Run pip install "mlx-k3[cuda12]".',
    ),
    _fact(
        DOES,
        "./scripts/quickstart; the quickstart script; scripts/quickstart; quickstart",
        "./scripts/quickstart installs into .venv, converts the bundled checkpoint, "
        "answers a prompt and opens a chat.",
    ),
    _fact(
        DOES,
        "./scripts/test; the test script; scripts/test",
        "./scripts/test runs lint, format and all tests.",
        "How do I run the tests?", "How can I run all tests?", "How are the tests run?",
    ),
    _fact(
        WHAT,
        "OpenBLAS; libopenblas0; the OpenBLAS library",
        "OpenBLAS makes matrix products on a Linux CPU many times faster.",
        "Why do I need OpenBLAS?", "What is OpenBLAS for?", "Why should I install OpenBLAS?",
    ),
    _fact(
        HOW,
        "use mlx-k3 in Python; call mlx-k3 from Python; load a model in Python; "
        "use the Python interface",
        "Write from mlx_k3 import generate, load and then model, tokenizer = load(folder).",
    ),
    _fact(
        HOW,
        "see all commands; list the commands of mlx-k3; find out which commands there are; "
        "get help",
        "Run mlx-k3 --help.",
        "Which commands are there?", "Which commands does mlx-k3 have?", "What commands exist?",
    ),
)  # fmt: skip

_COMMANDS = (
    _fact(
        DOES,
        "mlx-k3 chat; the chat command; the command chat",
        "mlx-k3 chat opens a conversation with a model.",
    ),
    _fact(
        HOW,
        "talk with a model; chat with a model; start a conversation; open a chat; talk to a model",
        "Run mlx-k3 chat FOLDER.",
    ),
    _fact(
        DOES,
        "mlx-k3 generate; the generate command; the command generate",
        "mlx-k3 generate answers one prompt.",
    ),
    _fact(
        HOW,
        "answer a single prompt; answer one prompt; get one answer from a script; "
        "ask a model one question from the shell",
        "Run mlx-k3 generate FOLDER --prompt with your question.",
    ),
    _fact(
        DOES,
        "mlx-k3 convert; the convert command; the command convert; the converter",
        "mlx-k3 convert turns a release into an MLX model folder, in flat memory.",
    ),
    _fact(
        HOW,
        "convert a model; convert a release; convert Kimi K3; make an MLX folder from a release; "
        "convert a checkpoint",
        "Run mlx-k3 convert SOURCE OUT.",
    ),
    _fact(
        DOES,
        "mlx-k3 inspect; the inspect command; the command inspect",
        "mlx-k3 inspect shows architecture, parameters, bytes and precision, reading only headers.",
    ),
    _fact(
        HOW,
        "look at a model without downloading it; see the architecture of a model; "
        "inspect a model; see how many parameters a model has",
        "Run mlx-k3 inspect MODEL.",
    ),
    _fact(
        DOES,
        "mlx-k3 plan; the plan command; the command plan",
        "mlx-k3 plan shows what fits into a memory, and how fast it can be at best.",
    ),
    _fact(
        HOW,
        "see what fits into memory; know whether a model fits into my memory; "
        "find out how fast a model can be; plan memory",
        "Run mlx-k3 plan MODEL.",
        "Will the model fit into my memory?", "Does K3 fit into my memory?",
    ),
    _fact(
        DOES,
        "mlx-k3 verify; the verify command; the command verify",
        "mlx-k3 verify checks every file of a converted folder by its checksum.",
    ),
    _fact(
        HOW,
        "check a converted folder; verify a conversion; make sure that a folder is not damaged; "
        "check the checksums of a folder",
        "Run mlx-k3 verify FOLDER.",
    ),
    _fact(
        DOES,
        "mlx-k3 doctor; the doctor command; the command doctor",
        "mlx-k3 doctor shows versions, device, BLAS and disk, and checks the arithmetic.",
    ),
    _fact(
        HOW,
        "check my installation; check my machine; see which BLAS is in use; "
        "test whether mlx-k3 computes right on my machine",
        "Run mlx-k3 doctor.",
    ),
    _fact(
        DOES,
        "mlx-k3 trace; the trace command; the command trace",
        "mlx-k3 trace shows hit rates, bytes a token and waiting of a recorded run.",
    ),
    _fact(
        HOW,
        "read a recorded trace; evaluate a trace file; simulate other pools and policies; "
        "look at a trace",
        "Run mlx-k3 trace FILE.",
    ),
    _fact(
        DOES,
        "mlx-k3 train; the train command; the command train",
        "mlx-k3 train trains a model as a configuration file says.",
    ),
    _fact(
        HOW,
        "train a model; train a small K3; train my own model; start a training",
        "Run mlx-k3 train CONFIG.",
    ),
    _fact(
        DOES,
        "mlx-k3 eval; the eval command; the command eval",
        "mlx-k3 eval measures the accuracy of a model on each family of tasks.",
    ),
    _fact(
        HOW,
        "measure the accuracy of a model; evaluate a model; test how good a model is; "
        "score a model on the tasks",
        "Run mlx-k3 eval MODEL.",
    ),
)  # fmt: skip

_CHAT = (
    _fact(
        HOW,
        "leave the chat; quit the chat; end a chat; exit a chat; get out of the chat",
        "Type /exit or press Ctrl-D.",
    ),
    _fact(
        HOW,
        "start the chat anew; forget the conversation; clear the chat; begin a new conversation",
        "Type /reset.",
    ),
    _fact(
        HOW,
        "save a conversation; save the chat; keep a chat for later; write a chat to a file",
        "Type /save FILE.",
    ),
    _fact(
        HOW,
        "load a conversation; load a saved chat; go on with a saved chat; open an old chat",
        "Type /load FILE.",
    ),
    _fact(
        HOW,
        "change the system message in a chat; set another system message while chatting; "
        "give the chat a system message",
        "Type /system TEXT.",
    ),
    _fact(
        HOW,
        "see statistics in a chat; see the speed of a chat; show the figures of a chat",
        "Type /stats.",
    ),
    _fact(
        HOW,
        "see what I can type in a chat; list the commands of a chat; get help in a chat",
        "Type /help.",
    ),
)  # fmt: skip

_OPTIONS = (
    _fact(
        DOES,
        "--memory; the option --memory; the --memory flag; --memory 24GB",
        "--memory sets what the process may occupy, as in --memory 24GB.",
        "How do I limit the memory?", "How can I limit memory?", "How do I set a memory budget?",
    ),
    _fact(
        DOES,
        "--memory auto; the value auto of --memory",
        "--memory auto takes what is free now and leaves a reserve.",
    ),
    _fact(
        DOES,
        "--context; the option --context; the --context flag",
        "--context sets for how many tokens memory is planned, 4k by default.",
    ),
    _fact(
        DOES,
        "--policy; the option --policy; the --policy flag",
        "--policy chooses which expert leaves a full pool: lru or lfu.",
    ),
    _fact(
        DOES,
        "lru; --policy lru; the policy lru",
        "lru evicts the expert that was unused longest; it is the default.",
    ),
    _fact(
        DOES,
        "lfu; --policy lfu; the policy lfu",
        "lfu evicts the expert that was used least often.",
    ),
    _fact(
        DOES,
        "--no-prefetch; the option --no-prefetch; the --no-prefetch flag",
        "--no-prefetch reads nothing before it is asked for.",
        "How do I switch prefetching off?", "How can I turn off prefetching?",
    ),
    _fact(
        DOES,
        "--active-experts; the option --active-experts; the --active-experts flag",
        "--active-experts N uses only the N heaviest experts of a token, which changes answers.",
    ),
    _fact(
        DOES,
        "--drop-missed; the option --drop-missed; the --drop-missed flag",
        "--drop-missed leaves out light experts that would have to be read, which changes answers.",
    ),
    _fact(
        DOES,
        "--trace; the option --trace; the --trace flag",
        "--trace FILE records which experts are used and read.",
        "How do I record a trace?", "How can I record a trace?",
    ),
    _fact(
        DOES,
        "--experts; the option --experts; the --experts flag",
        "--experts is copy, reference or mxfp4: what convert does with the experts.",
    ),
    _fact(
        DOES,
        "--experts copy; the value copy of --experts",
        "--experts copy copies the release's MXFP4 experts byte for byte; it is the default.",
    ),
    _fact(
        DOES,
        "--experts reference; the value reference of --experts",
        "--experts reference leaves the experts in the release's shards and writes only the rest.",
        "How do I convert without copying the experts?", "How can I leave the experts in place?",
    ),
    _fact(
        DOES,
        "--experts mxfp4; the value mxfp4 of --experts",
        "--experts mxfp4 quantizes experts that are bfloat16.",
    ),
    _fact(
        DOES,
        "--trunk; the option --trunk; the --trunk flag",
        "--trunk sets the precision of all but the experts: bf16, mxfp8, q8, q6 or q4.",
    ),
    _fact(
        SIZE,
        "default precision of the trunk; default of --trunk; default value of --trunk",
        "The default of --trunk is q8.",
    ),
    _fact(
        DOES,
        "--dry-run; the option --dry-run; the --dry-run flag",
        "--dry-run checks everything and shows the plan, but writes nothing.",
    ),
    _fact(
        DOES,
        "--free-source; the option --free-source; the --free-source flag",
        "--free-source deletes each downloaded shard once it is used.",
    ),
    _fact(
        DOES,
        "--revision; the option --revision; the --revision flag",
        "--revision names a branch, tag or commit on the Hub.",
    ),
    _fact(
        DOES,
        "--json; the option --json; the --json flag",
        "--json prints one JSON object.",
        "How do I get JSON output?", "How can I get the output as JSON?",
    ),
    _fact(
        DOES,
        "--no-thinking; the option --no-thinking; the --no-thinking flag",
        "--no-thinking answers at once, without thinking before.",
        "How do I switch thinking off?", "How can I turn off the thinking?",
    ),
    _fact(
        DOES,
        "--raw; the option --raw; the --raw flag",
        "--raw continues the prompt's text without the chat format.",
    ),
    _fact(
        DOES,
        "--ids; the option --ids; the --ids flag",
        "--ids continues token ids, also without a tokenizer.",
    ),
    _fact(
        DOES,
        "--temp; the option --temp; the --temp flag; the temperature",
        "--temp sets the temperature; 0 takes the likeliest token.",
    ),
    _fact(
        DOES,
        "--top-p; the option --top-p; the --top-p flag",
        "--top-p samples among the likeliest tokens of this total probability.",
    ),
    _fact(
        DOES,
        "--seed; the option --seed; the --seed flag",
        "--seed makes sampling repeatable.",
    ),
    _fact(
        DOES,
        "--max-tokens; the option --max-tokens; the --max-tokens flag",
        "--max-tokens stops an answer after so many tokens, 4096 by default.",
        "How do I limit the length of an answer?", "How can I make answers shorter?",
    ),
    _fact(
        DOES,
        "--system; the option --system; the --system flag",
        "--system gives the model a system message.",
    ),
    _fact(
        DOES,
        "--prompt; the option --prompt; the --prompt flag",
        "--prompt says what to answer; - reads it from standard input.",
        "How do I pipe a prompt in?", "How can I read the prompt from standard input?",
    ),
    _fact(
        DOES,
        "--against; the option --against; verify --against",
        "verify --against SOURCE compares every tensor with the release.",
    ),
    _fact(
        DOES,
        "--measure; the option --measure; plan --measure",
        "plan --measure measures how fast experts are read from a folder or file.",
    ),
    _fact(
        DOES,
        "--ssd; the option --ssd; plan --ssd",
        "plan --ssd says what the SSD reads a second.",
    ),
    _fact(
        DOES,
        "--plot; the option --plot; trace --plot",
        "trace --plot draws hit rate and residency into a file.",
    ),
)  # fmt: skip

PROGRAM_FACTS = _PROJECT + _COMMANDS + _CHAT + _OPTIONS
