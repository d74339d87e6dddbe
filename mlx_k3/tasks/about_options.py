"""Facts about the options of mlx-k3's commands."""

from .about_fact import DOES, SIZE, fact

OPTION_FACTS = (
    fact(
        DOES,
        "--memory; the option --memory; the --memory flag; --memory 24GB",
        "--memory sets what the process may occupy, as in --memory 24GB.",
        "How do I limit the memory?", "How can I limit memory?", "How do I set a memory budget?",
    ),
    fact(
        DOES,
        "--memory auto; the value auto of --memory",
        "--memory auto takes what is free now and leaves a reserve.",
    ),
    fact(
        DOES,
        "--context; the option --context; the --context flag",
        "--context sets for how many tokens memory is planned, 4k by default.",
    ),
    fact(
        DOES,
        "--policy; the option --policy; the --policy flag",
        "--policy chooses which expert leaves a full pool: lru or lfu.",
    ),
    fact(
        DOES,
        "lru; --policy lru; the policy lru",
        "lru evicts the expert that was unused longest; it is the default.",
    ),
    fact(
        DOES,
        "lfu; --policy lfu; the policy lfu",
        "lfu evicts the expert that was used least often.",
    ),
    fact(
        DOES,
        "--no-prefetch; the option --no-prefetch; the --no-prefetch flag",
        "--no-prefetch reads nothing before it is asked for.",
        "How do I switch prefetching off?", "How can I turn off prefetching?",
    ),
    fact(
        DOES,
        "--active-experts; the option --active-experts; the --active-experts flag",
        "--active-experts N uses only the N heaviest experts of a token, which changes answers.",
    ),
    fact(
        DOES,
        "--drop-missed; the option --drop-missed; the --drop-missed flag",
        "--drop-missed leaves out light experts that would have to be read, which changes answers.",
    ),
    fact(
        DOES,
        "--trace; the option --trace; the --trace flag",
        "--trace FILE records which experts are used and read.",
        "How do I record a trace?", "How can I record a trace?",
    ),
    fact(
        DOES,
        "--experts; the option --experts; the --experts flag",
        "--experts is copy, reference or mxfp4: what convert does with the experts.",
    ),
    fact(
        DOES,
        "--experts copy; the value copy of --experts",
        "--experts copy copies the release's MXFP4 experts byte for byte; it is the default.",
    ),
    fact(
        DOES,
        "--experts reference; the value reference of --experts",
        "--experts reference leaves the experts in the release's shards and writes only the rest.",
        "How do I convert without copying the experts?", "How can I leave the experts in place?",
    ),
    fact(
        DOES,
        "--experts mxfp4; the value mxfp4 of --experts",
        "--experts mxfp4 quantizes experts that are bfloat16.",
    ),
    fact(
        DOES,
        "--trunk; the option --trunk; the --trunk flag",
        "--trunk sets the precision of all but the experts: bf16, mxfp8, q8, q6 or q4.",
    ),
    fact(
        SIZE,
        "default precision of the trunk; default of --trunk; default value of --trunk",
        "The default of --trunk is q8.",
    ),
    fact(
        DOES,
        "--dry-run; the option --dry-run; the --dry-run flag",
        "--dry-run checks everything and shows the plan, but writes nothing.",
    ),
    fact(
        DOES,
        "--free-source; the option --free-source; the --free-source flag",
        "--free-source deletes each downloaded shard once it is used.",
    ),
    fact(
        DOES,
        "--revision; the option --revision; the --revision flag",
        "--revision names a branch, tag or commit on the Hub.",
    ),
    fact(
        DOES,
        "--json; the option --json; the --json flag",
        "--json prints one JSON object.",
        "How do I get JSON output?", "How can I get the output as JSON?",
    ),
    fact(
        DOES,
        "--no-thinking; the option --no-thinking; the --no-thinking flag",
        "--no-thinking answers at once, without thinking before.",
        "How do I switch thinking off?", "How can I turn off the thinking?",
    ),
    fact(
        DOES,
        "--raw; the option --raw; the --raw flag",
        "--raw continues the prompt's text without the chat format.",
    ),
    fact(
        DOES,
        "--ids; the option --ids; the --ids flag",
        "--ids continues token ids, also without a tokenizer.",
    ),
    fact(
        DOES,
        "--temp; the option --temp; the --temp flag; the temperature",
        "--temp sets the temperature; 0 takes the likeliest token.",
    ),
    fact(
        DOES,
        "--top-p; the option --top-p; the --top-p flag",
        "--top-p samples among the likeliest tokens of this total probability.",
    ),
    fact(
        DOES,
        "--seed; the option --seed; the --seed flag",
        "--seed makes sampling repeatable, and in eval the items.",
    ),
    fact(
        DOES,
        "--max-tokens; the option --max-tokens; the --max-tokens flag",
        "--max-tokens stops an answer after so many tokens, in chat 4096 by default.",
        "How do I limit the length of an answer?", "How can I make answers shorter?",
    ),
    fact(
        DOES,
        "--system; the option --system; the --system flag",
        "--system gives the model a system message.",
    ),
    fact(
        DOES,
        "--prompt; the option --prompt; the --prompt flag",
        "--prompt says what to answer; - reads it from standard input.",
        "How do I pipe a prompt in?", "How can I read the prompt from standard input?",
    ),
    fact(
        DOES,
        "--against; the option --against; verify --against",
        "verify --against SOURCE compares every tensor with the release.",
    ),
    fact(
        DOES,
        "--measure; the option --measure; plan --measure",
        "plan --measure measures how fast experts are read from a folder or file.",
    ),
    fact(
        DOES,
        "--ssd; the option --ssd; plan --ssd",
        "plan --ssd says what the SSD reads a second.",
    ),
    fact(
        DOES,
        "--plot; the option --plot; the --plot flag",
        "--plot draws into a file: the hit rate of a trace, or the losses of a training.",
    ),
    fact(
        DOES,
        "--task; the option --task; eval --task",
        "eval --task measures only one family of tasks and can be repeated.",
    ),
    fact(
        DOES,
        "--items; the option --items; eval --items",
        "eval --items sets how many items of each family are asked, 100 by default.",
    ),
    fact(
        DOES,
        "--text; the option --text; eval --text",
        "eval --text measures the perplexity of a text file.",
        "How do I measure perplexity?", "How can I measure the perplexity of a text?",
    ),
)  # fmt: skip
