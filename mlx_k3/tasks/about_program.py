"""Facts about mlx-k3: what it is, where it runs, its commands, its chat."""

from .about_fact import DOES, HOW, SIZE, WHAT, fact

_PROJECT = (
    fact(
        WHAT,
        "mlx-k3; the mlx-k3 package; this program; the program mlx-k3",
        "mlx-k3 runs Kimi K3 and its relatives on your own machine with MLX.",
        "What does mlx-k3 do?", "What is mlx-k3 for?", "What can I do with mlx-k3?",
    ),
    fact(
        WHAT,
        "MLX; the framework MLX; Apple's MLX",
        "MLX is Apple's array framework for machine learning.",
        "Which framework does mlx-k3 use?", "What is mlx-k3 built on?",
    ),
    fact(
        WHAT,
        "Kimi K3; K3; the model Kimi K3; Moonshot's K3",
        "Kimi K3 is a large language model by Moonshot AI with 2.78 trillion parameters.",
        "Who made Kimi K3?", "Who made K3?", "Which company made Kimi K3?", "Who built Kimi K3?",
    ),
    fact(
        WHAT,
        "Kimi Linear; the Kimi Linear model; Kimi-Linear-48B-A3B",
        "Kimi Linear is a smaller relative of Kimi K3 that mlx-k3 runs too.",
    ),
    fact(
        SIZE,
        "license of mlx-k3; license of the code; license of this program; licence of mlx-k3",
        "The code of mlx-k3 and its bundled checkpoint are under Apache-2.0.",
        "Which license does mlx-k3 have?", "Is mlx-k3 open source?", "How is mlx-k3 licensed?",
    ),
    fact(
        SIZE,
        "Python version for mlx-k3; Python version that mlx-k3 needs; required Python version",
        "mlx-k3 needs Python 3.11, 3.12 or 3.13.",
        "Which Python does mlx-k3 need?", "Which Python version do I need?",
        "Which versions of Python work with mlx-k3?",
    ),
    fact(
        SIZE,
        "list of supported systems; operating system for mlx-k3; system that mlx-k3 needs",
        "mlx-k3 runs on macOS 14 or later with Apple silicon, and on Linux.",
        "Where does mlx-k3 run?", "Does mlx-k3 run on Linux?", "Does mlx-k3 run on a Mac?",
        "Which systems does mlx-k3 support?", "Which operating systems does mlx-k3 run on?",
    ),
    fact(
        HOW,
        "install mlx-k3 on a Mac; install mlx-k3 on macOS; set up mlx-k3 on Apple silicon",
        "Run pip install mlx-k3.",
        "How do I install mlx-k3?", "How can I install mlx-k3?", "How do I set up mlx-k3?",
    ),
    fact(
        HOW,
        "install mlx-k3 on Linux without a GPU; install mlx-k3 on a Linux CPU; "
        "set up mlx-k3 on Linux with a CPU only",
        'Run pip install "mlx-k3[cpu]" and apt install libopenblas0.',
    ),
    fact(
        HOW,
        "install mlx-k3 with CUDA 13; install mlx-k3 for CUDA 13; set up mlx-k3 on CUDA 13",
        'Run pip install "mlx-k3[cuda13]".',
    ),
    fact(
        HOW,
        "install mlx-k3 with CUDA 12; install mlx-k3 for CUDA 12; set up mlx-k3 on CUDA 12",
        'Run pip install "mlx-k3[cuda12]".',
    ),
    fact(
        DOES,
        "./scripts/quickstart; the quickstart script; scripts/quickstart; quickstart",
        "./scripts/quickstart installs into .venv, converts the bundled checkpoint, "
        "answers a prompt and opens a chat.",
    ),
    fact(
        DOES,
        "./scripts/test; the test script; scripts/test",
        "./scripts/test runs lint, format and all tests.",
        "How do I run the tests?", "How can I run all tests?", "How are the tests run?",
    ),
    fact(
        WHAT,
        "OpenBLAS; libopenblas0; the OpenBLAS library",
        "OpenBLAS makes matrix products on a Linux CPU many times faster.",
        "Why do I need OpenBLAS?", "What is OpenBLAS for?", "Why should I install OpenBLAS?",
    ),
    fact(
        HOW,
        "use mlx-k3 in Python; call mlx-k3 from Python; load a model in Python; "
        "use the Python interface",
        "Write from mlx_k3 import generate, load and then model, tokenizer = load(folder).",
    ),
    fact(
        HOW,
        "see all commands; list the commands of mlx-k3; find out which commands there are; "
        "get help",
        "Run mlx-k3 --help.",
        "Which commands are there?", "Which commands does mlx-k3 have?", "What commands exist?",
    ),
)  # fmt: skip

_COMMANDS = (
    fact(
        DOES,
        "mlx-k3 chat; the chat command; the command chat",
        "mlx-k3 chat opens a conversation with a model.",
    ),
    fact(
        HOW,
        "talk with a model; chat with a model; start a conversation; open a chat; talk to a model",
        "Run mlx-k3 chat FOLDER.",
    ),
    fact(
        DOES,
        "mlx-k3 generate; the generate command; the command generate",
        "mlx-k3 generate answers one prompt.",
    ),
    fact(
        HOW,
        "answer a single prompt; answer one prompt; get one answer from a script; "
        "ask a model one question from the shell",
        "Run mlx-k3 generate FOLDER --prompt with your question.",
    ),
    fact(
        DOES,
        "mlx-k3 convert; the convert command; the command convert; the converter",
        "mlx-k3 convert turns a release into an MLX model folder, in flat memory.",
    ),
    fact(
        HOW,
        "convert a model; convert a release; convert Kimi K3; make an MLX folder from a release; "
        "convert a checkpoint",
        "Run mlx-k3 convert SOURCE OUT.",
    ),
    fact(
        DOES,
        "mlx-k3 inspect; the inspect command; the command inspect",
        "mlx-k3 inspect shows architecture, parameters, bytes and precision, reading only headers.",
    ),
    fact(
        HOW,
        "look at a model without downloading it; see the architecture of a model; "
        "inspect a model; see how many parameters a model has",
        "Run mlx-k3 inspect MODEL.",
    ),
    fact(
        DOES,
        "mlx-k3 plan; the plan command; the command plan",
        "mlx-k3 plan shows what fits into a memory, and how fast it can be at best.",
    ),
    fact(
        HOW,
        "see what fits into memory; know whether a model fits into my memory; "
        "find out how fast a model can be; plan memory",
        "Run mlx-k3 plan MODEL.",
        "Will the model fit into my memory?", "Does K3 fit into my memory?",
    ),
    fact(
        DOES,
        "mlx-k3 verify; the verify command; the command verify",
        "mlx-k3 verify checks every file of a converted folder by its checksum.",
    ),
    fact(
        HOW,
        "check a converted folder; verify a conversion; make sure that a folder is not damaged; "
        "check the checksums of a folder",
        "Run mlx-k3 verify FOLDER.",
    ),
    fact(
        DOES,
        "mlx-k3 doctor; the doctor command; the command doctor",
        "mlx-k3 doctor shows versions, device, BLAS and disk, and checks the arithmetic.",
    ),
    fact(
        HOW,
        "check my installation; check my machine; see which BLAS is in use; "
        "test whether mlx-k3 computes right on my machine",
        "Run mlx-k3 doctor.",
    ),
    fact(
        DOES,
        "mlx-k3 trace; the trace command; the command trace",
        "mlx-k3 trace shows hit rates, bytes a token and waiting of a recorded run.",
    ),
    fact(
        HOW,
        "read a recorded trace; evaluate a trace file; simulate other pools and policies; "
        "look at a trace",
        "Run mlx-k3 trace FILE.",
    ),
    fact(
        DOES,
        "mlx-k3 train; the train command; the command train",
        "mlx-k3 train trains a model as a configuration file says.",
    ),
    fact(
        HOW,
        "train a model; train a small K3; train my own model; start a training",
        "Run mlx-k3 train CONFIG.",
    ),
    fact(
        DOES,
        "mlx-k3 eval; the eval command; the command eval",
        "mlx-k3 eval measures the accuracy of a model on each family of tasks.",
    ),
    fact(
        HOW,
        "measure the accuracy of a model; evaluate a model; test how good a model is; "
        "score a model on the tasks",
        "Run mlx-k3 eval MODEL.",
    ),
)  # fmt: skip

_CHAT = (
    fact(
        HOW,
        "leave the chat; quit the chat; end a chat; exit a chat; get out of the chat",
        "Type /exit or press Ctrl-D.",
    ),
    fact(
        HOW,
        "start the chat anew; forget the conversation; clear the chat; begin a new conversation",
        "Type /reset.",
    ),
    fact(
        HOW,
        "save a conversation; save the chat; keep a chat for later; write a chat to a file",
        "Type /save FILE.",
    ),
    fact(
        HOW,
        "load a conversation; load a saved chat; go on with a saved chat; open an old chat",
        "Type /load FILE.",
    ),
    fact(
        HOW,
        "change the system message in a chat; set another system message while chatting; "
        "give the chat a system message",
        "Type /system TEXT.",
    ),
    fact(
        HOW,
        "see statistics in a chat; see the speed of a chat; show the figures of a chat",
        "Type /stats.",
    ),
    fact(
        HOW,
        "see what I can type in a chat; list the commands of a chat; get help in a chat",
        "Type /help.",
    ),
)  # fmt: skip

PROGRAM_FACTS = _PROJECT + _COMMANDS + _CHAT
