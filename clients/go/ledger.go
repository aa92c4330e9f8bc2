package tmc

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	tmcv1 "tmc/v1"
)

const (
	committed  = 1 // the states of a row in tmc_ledger
	rolledBack = 2

	page          = 500
	resumeEvery   = time.Minute
	resumeWithin  = 30 * time.Second // a page
	prepareWithin = 5 * time.Second  // the local transaction is open meanwhile
	decideWithin  = 2 * time.Second  // then it continues in the background, or a check decides
	discardWithin = 500 * time.Millisecond

	backgroundWithin = time.Minute
)

// Ledger is the list of committed messages in the database of a service. A row of it is written by the transaction that a message
// belongs to, so it can always be answered what became of it.
type Ledger struct {
	client   *Client
	db       *sql.DB
	database Database
	id       []byte
	settled  chan string
	refused  sync.Map // ids of messages that are committed here and decided otherwise at the center
}

// Ledger returns the ledger in db, which gets its tables if it has none. From then on, messages that an earlier process committed
// and could not submit are submitted. A client has one: make another client for another database.
func (c *Client) Ledger(ctx context.Context, db *sql.DB, database Database) (*Ledger, error) {
	if err := database.createTables(ctx, db, ledgerTables); err != nil {
		return nil, err
	}
	insert := database.insertUnless("tmc_ledger_info", "id, ledger_id")
	if _, err := db.ExecContext(ctx, insert, 1, NewAttempt()); err != nil {
		return nil, database.failed(err)
	}
	l := &Ledger{client: c, db: db, database: database, settled: make(chan string, 10_000)}
	if err := db.QueryRowContext(ctx, "SELECT ledger_id FROM tmc_ledger_info").Scan(&l.id); err != nil {
		return nil, database.failed(err)
	}
	if err := c.hasLedger(l.id); err != nil {
		return nil, err
	}
	if !c.background(l.settle) || !c.background(l.resume) {
		return nil, ErrClosed
	}
	return l, nil
}

// Tx is a local transaction that sends messages. Transact commits it or rolls it back.
type Tx struct {
	*sql.Tx
	lock   sync.Mutex
	sent   []sent
	isOver bool
}

type sent struct {
	id      string // "" before it is prepared
	message Message
}

// Commit refuses: return nil from the function that was given to Transact.
func (t *Tx) Commit() error { return errNotYours }

// Rollback refuses: return an error from the function that was given to Transact.
func (t *Tx) Rollback() error { return errNotYours }

var (
	errNotYours = errors.New("tmc: Transact ends the transaction when your function returns")
	errEnded    = errors.New("tmc: the transaction was ended within the function. What it committed stays, and nothing is sent: let Transact end it")
)

// Send has a message delivered if the transaction commits. It is prepared when the function given to Transact has returned; after
// that, Send panics: the message would be lost.
func (t *Tx) Send(m Message) {
	t.lock.Lock()
	defer t.lock.Unlock()
	if t.isOver {
		panic("tmc: Send after the function of the transaction has returned")
	}
	m.Attempt = NewAttempt() // of this transaction alone
	t.sent = append(t.sent, sent{message: m})
}

// collected returns the messages, once.
func (t *Tx) collected() ([]sent, error) {
	t.lock.Lock()
	defer t.lock.Unlock()
	keys, messages := map[[2]string]bool{}, t.sent
	for _, each := range messages {
		key := [2]string{each.message.Topic, each.message.Key}
		if keys[key] {
			return nil, fmt.Errorf("tmc: two messages of %s with the key %q in one transaction: give each a key of its own", key[0], key[1])
		}
		keys[key] = true
	}
	t.isOver = true
	return messages, nil
}

var (
	// ErrFenced says that a transaction must be run again.
	ErrFenced = errors.New("tmc: a check was answered with ROLLBACK before this transaction committed, so it cannot any more: run it again")
	// ErrInDoubt says that nobody knows yet whether a transaction committed.
	ErrInDoubt = errors.New("tmc: the transaction may have committed")
)

// Transact runs work in a transaction, prepares the messages that it sent, and commits; or rolls back if work returns an error or
// panics, or a message cannot be prepared. The messages are delivered in the first case and discarded in the second.
//
// No error: the transaction is committed, and its messages are submitted, or will be as soon as the center answers.
// An *Error: a message was refused; with KEY_IN_PROGRESS, run it again after RetryAfter.
// ErrFenced: it took so long that a check was answered with ROLLBACK; run it again.
// ErrInDoubt: the database did not say whether it committed, and cannot be asked now, or has no message to ask about. The messages
// follow the truth: the center asks later.
func (l *Ledger) Transact(ctx context.Context, work func(tx *Tx) error) error {
	local, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer local.Rollback() // of what is not committed, also when work panics
	tx := &Tx{Tx: local}
	if err := l.database.hold(ctx, local); err != nil {
		return err
	}
	if err := work(tx); err != nil {
		return err
	}
	messages, err := tx.collected()
	if err != nil {
		return err
	}
	if err = l.database.release(ctx, local); err == nil {
		err = l.prepare(ctx, messages)
	}
	if err == nil {
		err = l.write(ctx, local, messages)
	}
	if err != nil {
		_ = local.Rollback() // first: who has to wait for it need not wait for the center
		l.discard(ctx, messages)
		return ended(ctx, err)
	}
	if err := local.Commit(); err != nil && !l.isCommitted(ctx, messages, &err) {
		return err
	}
	l.submit(ctx, messages)
	return nil
}

// ended explains an error of a transaction that is over already.
func ended(ctx context.Context, err error) error {
	switch {
	case !errors.Is(err, sql.ErrTxDone):
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return errEnded
}

// prepare prepares all messages at once, and notes their ids.
func (l *Ledger) prepare(ctx context.Context, messages []sent) error {
	ctx, cancel := context.WithTimeoutCause(ctx, prepareWithin, &Error{
		Code: codes.DeadlineExceeded, Message: "The center did not answer while the transaction was open: run it again.",
	})
	defer cancel()
	failures := make([]error, len(messages))
	each(len(messages), func(i int) {
		messages[i].id, failures[i] = l.client.prepare(ctx, messages[i].message, l.id)
	})
	return errors.Join(failures...)
}

// write inserts the rows of the messages, in the order of their keys: two transactions cannot wait for each other.
func (l *Ledger) write(ctx context.Context, tx *sql.Tx, messages []sent) error {
	rows := slices.SortedFunc(slices.Values(messages), func(a, b sent) int { return cmp.Compare(a.id, b.id) })
	insert := l.database.insertUnless("tmc_ledger", "message_id, state, topic, message_key, attempt_id, created_ms")
	for _, row := range rows {
		m := row.message
		done, err := tx.ExecContext(ctx, insert, row.id, committed, m.Topic, m.Key, m.Attempt, nowMs())
		if err != nil {
			return err
		}
		if changed, err := done.RowsAffected(); err != nil {
			return err
		} else if changed == 0 {
			return ErrFenced
		}
	}
	return nil
}

// isCommitted asks the ledger after a Commit failed: the database may have committed, and its answer was lost. The fence makes
// a "no" final. why: the error of Commit; becomes what the caller gets.
func (l *Ledger) isCommitted(ctx context.Context, messages []sent, why *error) bool {
	if len(messages) == 0 {
		if *why = ended(ctx, *why); *why != errEnded && ctx.Err() == nil {
			*why = fmt.Errorf("%w: %w", ErrInDoubt, *why)
		}
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), decideWithin)
	defer cancel()
	m := messages[0]
	answer := l.answer(ctx, &tmcv1.CheckRequest{
		MessageId: m.id, Topic: m.message.Topic, Key: m.message.Key, AttemptId: m.message.Attempt, LedgerId: l.id, CreatedMs: nowMs(),
	}, true)
	switch answer.Verdict {
	case tmcv1.Verdict_VERDICT_COMMIT:
		return true
	case tmcv1.Verdict_VERDICT_ROLLBACK:
		l.discard(ctx, messages)
		return false
	}
	*why = fmt.Errorf("%w: %w", ErrInDoubt, *why)
	return false
}

// discard rolls back messages at the center, also those whose prepare was not answered. What does not arrive, a check finds out.
func (l *Ledger) discard(ctx context.Context, messages []sent) {
	l.inBackground(ctx, discardWithin, func(within context.Context) { l.rollBack(within, messages) })
}

// inBackground runs work, which ends by itself after a while, and returns when it has ended, or it takes longer than the caller waits.
func (l *Ledger) inBackground(ctx context.Context, waits time.Duration, work func(within context.Context)) {
	finished := make(chan struct{})
	runs := l.client.background(func() {
		defer close(finished)
		within, cancel := context.WithTimeout(l.client.ctx, backgroundWithin)
		defer cancel()
		work(within)
	})
	if !runs {
		return // the client is closed: checks, and the next process, do the rest
	}
	select {
	case <-finished:
	case <-ctx.Done():
	case <-time.After(waits):
	}
}

func (l *Ledger) rollBack(ctx context.Context, messages []sent) {
	each(len(messages), func(i int) {
		m := messages[i]
		request := &tmcv1.RollbackRequest{MessageId: m.id}
		if m.id == "" {
			request = &tmcv1.RollbackRequest{Topic: m.message.Topic, Key: m.message.Key, AttemptId: m.message.Attempt}
		}
		if err := l.client.rollback(ctx, request); err != nil && m.id != "" {
			l.client.log.Info("tmc: a check rolls the message back", "topic", m.message.Topic, "key", m.message.Key, "error", err)
		}
	})
}

// submit submits messages in the order of their order keys. If that takes long, it continues without the caller.
func (l *Ledger) submit(ctx context.Context, messages []sent) {
	lines := grouped(messages, func(m sent) string {
		if m.message.OrderKey == "" {
			return m.id
		}
		return "\x00" + m.message.Topic + "\x00" + m.message.OrderKey
	})
	l.inBackground(ctx, decideWithin, func(within context.Context) {
		each(len(lines), func(i int) {
			for _, m := range lines[i] {
				if !l.submitOne(within, m.id) {
					return
				}
			}
		})
	})
}

// submitOne returns whether a later message of its order key may be submitted. What could not be, resume or a check submits.
func (l *Ledger) submitOne(ctx context.Context, id string) bool {
	err := l.client.Submit(ctx, id)
	if err == nil || hasReason(err, tmcv1.Reason_MESSAGE_GONE) {
		select {
		case l.settled <- id:
		default: // the database is slow: resume settles it
		}
		return true
	}
	if hasReason(err, tmcv1.Reason_ALREADY_ROLLED_BACK, tmcv1.Reason_MESSAGE_UNKNOWN) {
		l.refused.Store(id, true)
		l.client.log.Error("tmc: somebody decided otherwise about a committed message: see its ledger row", "message_id", id, "error", err)
		return true
	}
	l.client.log.Info("tmc: a committed message is submitted later", "message_id", id, "error", err)
	return false
}

// each calls do with 0 .. count-1 at once.
func each(count int, do func(int)) {
	if count == 1 {
		do(0)
		return
	}
	all := sync.WaitGroup{}
	for i := range count {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// grouped returns items by their names, in the order that they have.
func grouped[T any](items []T, name func(T) string) [][]T {
	groups, places := [][]T{}, map[string]int{}
	for _, item := range items {
		place, found := places[name(item)]
		if !found {
			place = len(groups)
			places[name(item)] = place
			groups = append(groups, nil)
		}
		groups[place] = append(groups[place], item)
	}
	return groups
}

// settle notes what the center has, some at a time, until the client is closed and all is noted.
func (l *Ledger) settle() {
	for {
		select {
		case id := <-l.settled:
			ids := []string{id}
			for len(ids) < page && len(l.settled) > 0 {
				ids = append(ids, <-l.settled)
			}
			if err := l.note(ids); err != nil {
				l.client.log.Info("tmc: messages are noted as settled later", "error", err)
				if !sleep(l.client.ctx, time.Second) {
					return // a mark that is lost costs one more submit
				}
			}
		case <-l.client.ctx.Done():
			if len(l.settled) == 0 {
				return
			}
		}
	}
}

// note marks rows as settled.
func (l *Ledger) note(ids []string) error {
	slices.Sort(ids)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.client.ctx), callTimeout)
	defer cancel()
	for few := range slices.Chunk(ids, 100) {
		values := []any{nowMs()}
		for _, id := range few {
			values = append(values, id)
		}
		mark := "UPDATE tmc_ledger" + l.database.byKey + " SET settled_ms = ? WHERE message_id IN (" + marks(len(few)) + ") AND settled_ms IS NULL"
		if _, err := l.db.ExecContext(ctx, l.database.sql(mark), values...); err != nil {
			return err
		}
	}
	return nil
}

// resume submits what is committed and not settled, at once and then every minute.
func (l *Ledger) resume() {
	before := nowMs() + time.Hour.Milliseconds() // at first all, whatever clock an earlier process had
	for {
		if err := l.submitUnsettled(before); err != nil && l.client.ctx.Err() == nil {
			l.client.log.Warn("tmc: committed messages are submitted later", "error", err)
		}
		if !sleep(l.client.ctx, resumeEvery) {
			return
		}
		before = nowMs() - resumeEvery.Milliseconds()
	}
}

func (l *Ledger) submitUnsettled(before int64) error {
	query := l.database.sql("SELECT message_id FROM tmc_ledger " +
		"WHERE settled_ms IS NULL AND state = ? AND created_ms < ? AND message_id > ? ORDER BY message_id LIMIT ?")
	for last := ""; ; {
		ids, err := textsOf(l.db.QueryContext(l.client.ctx, query, committed, before, last, page))
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			last = ids[len(ids)-1]
		}
		isLast := len(ids) < page
		l.submitPage(ids)
		if isLast {
			return nil
		}
	}
}

// submitPage submits messages, those of an ordered topic, which are all in one shard, in the order of their numbers.
func (l *Ledger) submitPage(ids []string) {
	ctx, cancel := context.WithTimeout(l.client.ctx, resumeWithin)
	defer cancel()
	ids = slices.DeleteFunc(ids, func(id string) bool { _, found := l.refused.Load(id); return found })
	slices.SortFunc(ids, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	shards := grouped(ids, func(id string) string { return id[:strings.LastIndexByte(id, '-')+1] })
	each(len(shards), func(i int) {
		for _, id := range shards[i] {
			if !l.submitOne(ctx, id) {
				return
			}
		}
	})
}

// textsOf returns the only column of rows.
func textsOf(rows *sql.Rows, err error) ([]string, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	texts := []string{}
	for rows.Next() {
		text := ""
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return texts, rows.Err()
}
