# Whole models on four GPUs: TP, 2-D, then FSDP once more.
timeout 100 python3 -m disttrain_launch --standalone --nproc-per-node 4 benchmarks/models_gpu.py tp 2d fsdp --steps 4 --ways "torch compiled" kernels --out $OUT/three.json > $OUT/three.txt 2>&1 < /dev/null
tail -n 14 $OUT/three.txt
