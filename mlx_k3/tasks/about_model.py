"""Facts about how Kimi K3 is built, how large it is, and how its experts are run on demand."""

from .about_fact import DOES, HOW, SIZE, WHAT, fact

_PARTS = (
    fact(
        WHAT,
        "KDA; Kimi Delta Attention; a KDA layer; the KDA mechanism",
        "KDA, Kimi Delta Attention, is linear attention with a gated delta rule and a fixed state.",
        "What does KDA stand for?", "How does KDA work?", "How does Kimi Delta Attention work?",
    ),
    fact(
        WHAT,
        "MLA; multi-head latent attention; gated MLA; an MLA layer",
        "MLA is attention that caches one small latent vector and a shared key for each token.",
        "What does MLA stand for?", "How does MLA work?", "How does latent attention work?",
    ),
    fact(
        WHAT,
        "AttnRes; an attention residual; the AttnRes mechanism; a residual mix",
        "With attention residuals each layer mixes earlier sums of the stream by a softmax.",
        "What are attention residuals?", "How do attention residuals work?",
        "Explain attention residuals.", "What does AttnRes stand for?",
    ),
    fact(
        WHAT,
        "SiTU; SiTU-GLU; the SiTU activation; the activation of K3",
        "SiTU is the gated activation of K3's MLPs; tanh bounds both of its factors.",
        "Which activation does K3 use?", "How does SiTU work?",
    ),
    fact(
        WHAT,
        "latent MoE; the latent mixture of experts; a latent MoE layer",
        "In a latent MoE the experts work in a narrower space than the hidden width.",
        "How does the latent MoE work?", "Why is the MoE called latent?",
    ),
    fact(
        WHAT,
        "MXFP4; the MXFP4 format; the precision MXFP4",
        "MXFP4 is a format of 4-bit floats with one scale for every 32 values.",
        "How does MXFP4 work?", "How are K3's experts stored?", "How many bits does MXFP4 have?",
    ),
    fact(
        WHAT,
        "XTML; the XTML format; the chat format of K3; K3's chat format",
        "XTML is Kimi K3's chat format: tags made of four control tokens, and text.",
        "Which chat format does K3 use?", "How does K3 read conversations?",
    ),
    fact(
        WHAT,
        "a delta rule; the delta rule; the gated delta rule",
        "A delta rule corrects a memory by the error of what it recalls for a key.",
        "How does a delta rule work?", "How does the delta rule work?",
    ),
    fact(
        WHAT,
        "the router; K3's router; the expert router",
        "The router scores the experts with a sigmoid and picks the best 16 for each token.",
        "How are experts chosen?", "How does the router work?", "How does K3 choose experts?",
    ),
    fact(
        WHAT,
        "the trunk; K3's trunk; a model's trunk",
        "The trunk is everything but the routed experts; it stays in memory.",
        "Which part of the model stays in memory?",
    ),
    fact(
        WHAT,
        "Quantile Balancing; the method Quantile Balancing",
        "Quantile Balancing sets the router's bias from quantiles so that experts share the load.",
        "How are the experts balanced?", "How does Quantile Balancing work?",
    ),
    fact(
        WHAT,
        "Muon; Per-Head Muon; the optimizer Muon",
        "Per-Head Muon is an optimizer that orthogonalises attention updates head by head.",
        "Which optimizer trains K3 nano?", "How does Muon work?",
    ),
    fact(
        WHAT,
        "the think channel; the thinking channel; the thinking",
        "The think channel holds what the model thinks before its response.",
    ),
    fact(
        WHAT,
        "mlx_k3.json; the file mlx_k3.json; the manifest",
        "mlx_k3.json is the manifest of a converted folder, with the checksum of every file.",
    ),
    fact(
        WHAT,
        "tiktoken.model; the file tiktoken.model; the vocabulary file",
        "tiktoken.model is the release's vocabulary: a base64 token and its rank on each line.",
    ),
    fact(
        SIZE,
        "file format of the weights; format of a converted folder; format that convert writes",
        "A converted folder is a plain MLX model folder with safetensors files.",
        "What does convert write?", "What is in a converted folder?",
    ),
)  # fmt: skip

_ON_DEMAND = (
    fact(
        WHAT,
        "experts on demand; offloading; running experts from the drive",
        "Experts are read from the drive into a pool of slots when a token needs them.",
        "How do experts on demand work?", "How does offloading work?",
        "How can a model run that is larger than memory?",
    ),
    fact(
        WHAT,
        "a slot; an expert slot; a slot of the pool",
        "A slot is a place in memory for one expert of any layer.",
        "What are slots?", "What are expert slots?",
    ),
    fact(
        WHAT,
        "the hit rate; a hit; a high hit rate",
        "The hit rate is the share of the needed bytes that were not read.",
    ),
    fact(
        WHAT,
        "a working set; the working set; one working set",
        "A working set is the experts of one token: 25.8 GB for Kimi K3.",
        "How many bytes of experts does a token need?", "How much does a token of K3 read?",
    ),
    fact(
        WHAT,
        "prefetching; prefetch; a prefetch",
        "Prefetching reads experts ahead that the next layer will probably need.",
        "How does prefetching work?",
    ),
    fact(
        HOW,
        "run a model larger than memory; run K3 with little memory; "
        "use a model that does not fit in memory",
        "Use --memory, and experts that do not fit are read when they are needed.",
    ),
    fact(
        HOW,
        "go on with an interrupted conversion; continue a stopped conversion; "
        "resume a conversion; resume convert",
        "Run the same command again: it goes on from where it stopped.",
        "What happens if a conversion is interrupted?", "What if convert is stopped?",
    ),
    fact(
        HOW,
        "open a converted folder with mlx-lm; use a converted folder in mlx-lm; "
        "load a converted model with mlx_lm",
        "Yes, mlx_lm.load opens a converted folder.",
        "Does mlx-lm open a converted folder?", "Can mlx-lm read the converted model?",
    ),
    fact(
        SIZE,
        "effect of offloading on answers; difference between offloaded and resident answers",
        "The answers are those of the whole model in memory.",
        "Does offloading change the answers?", "Are offloaded answers exact?",
        "Do experts on demand change the answers?", "Is running with little memory exact?",
    ),
    fact(
        SIZE,
        "bottleneck of experts on demand; limit of the speed with experts on demand",
        "The drive limits the speed: an exact token of K3 needs 25.8 GB of experts.",
        "What limits the speed of K3?", "Why is K3 slow with little memory?",
    ),
)  # fmt: skip

_SIZES = (
    fact(
        SIZE,
        "number of layers of K3; layer count of K3; number of layers in Kimi K3",
        "Kimi K3 has 93 layers: 69 KDA and 24 MLA.",
        "How many layers does K3 have?", "How many layers does Kimi K3 have?",
        "How many KDA layers does K3 have?", "How many MLA layers does K3 have?",
    ),
    fact(
        SIZE,
        "hidden size of K3; hidden width of Kimi K3; width of K3; hidden size of Kimi K3",
        "The hidden size of Kimi K3 is 7168.",
        "How wide is K3?", "How wide is Kimi K3?",
    ),
    fact(
        SIZE,
        "number of attention heads of K3; number of heads in Kimi K3; head count of K3",
        "Kimi K3 has 96 attention heads.",
        "How many heads does K3 have?", "How many attention heads does Kimi K3 have?",
    ),
    fact(
        SIZE,
        "number of experts of K3; number of routed experts in Kimi K3; expert count of K3",
        "Each MoE layer of Kimi K3 has 896 routed experts.",
        "How many experts does K3 have?", "How many routed experts does Kimi K3 have?",
        "How many experts are in a layer of K3?",
    ),
    fact(
        SIZE,
        "number of active experts of K3; number of experts a token uses",
        "A token uses 16 of the 896 routed experts of a layer.",
        "How many experts does a token use?", "How many experts are active in K3?",
        "How many active experts does Kimi K3 have?",
    ),
    fact(
        SIZE,
        "number of shared experts of K3; number of shared experts in Kimi K3",
        "Kimi K3 has 2 shared experts in each MoE layer, and every token uses them.",
        "How many shared experts does K3 have?", "What are shared experts?",
        "What is a shared expert?",
    ),
    fact(
        SIZE,
        "number of parameters of K3; parameter count of Kimi K3; size of K3 in parameters",
        "Kimi K3 has 2.78 trillion parameters, about 104 billion of them active for a token.",
        "How many parameters does K3 have?", "How many parameters does Kimi K3 have?",
        "How many parameters are active in K3?", "How big is K3?", "How large is Kimi K3?",
    ),
    fact(
        SIZE,
        "context length of K3; longest context of Kimi K3; context window of K3",
        "The context of Kimi K3 is 1,048,576 tokens.",
        "How long is the context of K3?", "How many tokens can K3 read?",
    ),
    fact(
        SIZE,
        "vocabulary size of K3; size of K3's vocabulary; number of tokens in K3's vocabulary",
        "The vocabulary of Kimi K3 has 163,840 tokens.",
        "How large is the vocabulary of K3?", "How big is K3's vocabulary?",
    ),
    fact(
        SIZE,
        "size of an expert; size of one expert of K3; number of bytes of an expert",
        "An expert of Kimi K3 takes 17.5 MB.",
        "How big is an expert?", "How large is one expert of K3?", "How many bytes has an expert?",
    ),
    fact(
        SIZE,
        "size of the release; size of Kimi K3 on disk; disk space for K3; download size of K3",
        "The release of Kimi K3 has 1.56 TB of tensors in 96 files.",
        "How much disk space does K3 need?", "How many files does the release have?",
        "How many shards does K3 have?", "How big is the download of K3?",
    ),
    fact(
        SIZE,
        "number of control tokens; count of control tokens; number of control slots",
        "K3's vocabulary ends with 256 control tokens.",
        "How many control tokens are there?", "How many control tokens does K3 have?",
    ),
    fact(
        DOES,
        "the KDA state; the recurrent state; the state of a KDA layer",
        "The state of a KDA layer sums up all tokens before it and never grows.",
        "Does the KDA state grow?", "How large does the KDA state get?",
    ),
)  # fmt: skip

MODEL_FACTS = _PARTS + _ON_DEMAND + _SIZES
