#!/bin/sh
# The figures of docs/reproduce-the-paper.md in their regime, the most important first. Run it again to resume.
#
#   scripts/figures.sh OUT [PART ...]     all parts: generated questions ablations privacy handwriting linear scratch ours tuned
#
# OUT/data holds the data sets. QUESTIONS (a CSV) and HANDWRITING (a .npz) name the files that are not part of the
# project. One core is enough: taskset -c 0 nice -n 19 scripts/figures.sh OUT. WORKERS=2 takes two.
set -eu
out=$1
shift
parts=${*:-generated questions ablations privacy handwriting linear scratch ours tuned}
fedbandit=${FEDBANDIT:-fedbandit}
data=$out/data
mkdir -p "$data"

figure() { # DATA NAME OPTIONS...: runs what the panel misses, and draws it
    figure_into "$1" "$@"
}

figure_into() { # FOLDER DATA NAME OPTIONS...
    folder=$1 set_=$2 name=$3
    shift 3
    $fedbandit figure "$name" --data "$data/$set_" --out "$out/$folder" --workers "${WORKERS:-1}" "$@" \
        >"$out/$folder-$name.txt" 2>&1 || echo "$folder $name: failed, see $out/$folder-$name.txt" >&2
}

handwriting_data() {
    [ -e "$data/handwriting" ] ||
        $fedbandit data import arrays "$HANDWRITING" --features images --labels labels --clients writers --invert \
            --out "$data/handwriting"
}

for part in $parts; do
    case $part in
    generated)
        [ -e "$data/so-like" ] ||
            $fedbandit data generate topics --clients 342477 --like stackoverflow --out "$data/so-like"
        for panel in fig2c fig2a fig2d fig2b fig3b; do figure so-like $panel --seeds 5; done
        ;;
    questions)
        [ -e "$data/so-questions" ] ||
            $fedbandit data import table "$QUESTIONS" --client user_id --text title --labels tags --vocabulary 10000 \
                --actions 50 --drop-unlabelled --out "$data/so-questions"
        for panel in fig2c fig2a fig2d fig2b fig3b; do figure so-questions $panel --seeds 5; done
        ;;
    handwriting)
        handwriting_data
        # 64 clients a round as in the paper; 32 examples a visit and a quarter of the rounds are what one core can do.
        for panel in fig1c fig1b fig3a ablation-server-optimizer ablation-importance-weighting fig1d; do
            seeds=2
            [ $panel = fig3a ] && seeds=5 # it is about the differences between them
            figure handwriting $panel --seeds $seeds --scale 0.25 --set client.max_examples=32 \
                --set pretraining.max_examples=160
        done
        ;;
    linear) # the released code's linear model, at full length
        handwriting_data
        for panel in fig1a fig4a fig4b; do
            figure_into handwriting-linear handwriting $panel --seeds 5 --set model.name=linear
        done
        ;;
    scratch) # the CNN from scratch, one long run for each curve
        handwriting_data
        figure handwriting fig1a --seeds 1 --set client.max_examples=32
        for panel in fig4a fig4b; do figure handwriting $panel --seeds 1 --scale 0.5 --set client.max_examples=32; done
        ;;
    tuned) # at most so many minutes of two workers each; took 4.8 core-hours in all
        for search in so-questions:fig2c:36 so-questions:fig2a:30 so-questions:fig2d:6 so-questions:fig2b:5 \
            so-questions:ablation-server-optimizer:10 so-questions:ablation-importance-weighting:10 \
            so-like:fig2c:28 so-like:fig2a:40 so-like:ablation-importance-weighting:6 \
            so-like:ablation-server-optimizer:5 so-like:fig2d:8 so-like:fig2b:7; do
            set_=${search%%:*} name=${search#*:}
            figure "$set_" "${name%:*}" --seeds 5 --tune --budget "${search##*:}"
        done
        ;;
    ablations)
        for name in ablation-server-optimizer ablation-importance-weighting; do
            figure so-like $name --seeds 5
            figure so-questions $name --seeds 5
        done
        ;;
    privacy)
        for panel in fig4c fig4d; do figure so-like $panel --seeds 5; done
        ;;
    ours)
        # 6,400 clients a round: 64 examples a visit, and not the preset's 256, are what two cores can do in minutes.
        for name in extrapolation cohorts; do figure so-like $name --seeds 2 --set client.max_examples=64; done
        figure so-like population --seeds 3
        for set_ in so-like so-questions; do figure $set_ weights --seeds 5; done
        ;;
    *)
        echo "$part: no such part" >&2
        exit 2
        ;;
    esac
done
