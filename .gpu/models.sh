# Whole models on four GPUs.
L="python3 -m disttrain_launch --standalone --nproc-per-node"
M=benchmarks/models_gpu.py
timeout 100 $L 4 $M fsdp --steps 5 --patience 52 --ways "torch compiled" "kernels around compiled" "kernels compiled" "ours compiled" kernels --profile "torch compiled" "kernels around compiled" --out $OUT/fsdp.json > $OUT/fsdp.txt 2>&1 < /dev/null
timeout 65 $L 4 $M tp --steps 5 --patience 40 --ways "torch compiled, gathered logits" "kernels compiled" "torch compiled" "ours compiled" --profile "torch compiled, gathered logits" "kernels compiled" --out $OUT/tp.json > $OUT/tp.txt 2>&1 < /dev/null
timeout 60 $L 4 $M 2d --steps 5 --patience 36 --ways "torch compiled, gathered logits" "kernels compiled" "torch compiled" --profile "kernels compiled" --out $OUT/2d.json > $OUT/2d.txt 2>&1 < /dev/null
NCCL_MAX_CTAS=8 timeout 50 $L 4 $M fsdp --steps 5 --patience 30 --ways "torch compiled" "kernels around compiled" --out $OUT/fsdp_8.json > $OUT/fsdp_8.txt 2>&1 < /dev/null
for f in fsdp fsdp_8 tp 2d; do grep -v "  *[0-9.]* ms  *[0-9]*  " $OUT/$f.txt | tail -n 12; done; date
cd $OUT && tar czf all.tgz *.txt *.json && rm -f *.txt *.json; ls -la
